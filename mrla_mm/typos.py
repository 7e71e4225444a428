"""Errors of mmengine that come of a name the user mistyped, as one line with the nearest name."""

import inspect
import re
from traceback import walk_tb
from types import TracebackType

from mmengine import registry

from mrla_mm.errors import did_you_mean


def find_typo(error: KeyError | TypeError) -> str:
    """Return a line with the nearest name if a config names an unknown type or argument."""
    said = str(error)
    if said == "None is not a callable object":  # mmengine's of an optimizer
        for frame, _ in walk_tb(error.__traceback__):
            if optimizer := frame.f_locals.get("optimizer_cfg"):
                said = f"{optimizer['type']} is not in the mmengine::optimizer registry"
    if match := re.search(r"(\w+) is not in the \S+?::(.+?) registry", said):
        name, kind = match.groups()
        roots = [each for each in vars(registry).values() if getattr(each, "name", "") == kind]
        families = [each for root in roots for each in (root, *root.children.values())]
        hint = did_you_mean(name, {known for each in families for known in each.module_dict})
        return f"there is no {kind} {name!r}{hint}" if hint else ""
    match = re.search(r"unexpected keyword argument '(\w+)'", said)
    built = find_built_class(error.__traceback__)
    if not match or not built:
        return ""
    classes = inspect.getmro(built) if inspect.isclass(built) else ()
    functions = [each.__init__ for each in classes] or [built]
    parameters = [inspect.signature(each).parameters for each in functions]
    hint = did_you_mean(match[1], {name for each in parameters for name in each})
    return f"{built.__name__} has no argument {match[1]!r}{hint}" if hint else ""


def find_built_class(traceback: TracebackType | None) -> object:
    """Return what mmengine was building last when an error came; None for nothing."""
    built = None
    for frame, _ in walk_tb(traceback):
        if frame.f_code.co_name == "build_from_cfg":
            built = frame.f_locals.get("obj_cls")
    return built
