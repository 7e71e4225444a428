"""Errors of mmengine that come of a name the user mistyped, as one line with the nearest name."""

import inspect
import re
from traceback import walk_tb
from types import TracebackType

from mmengine import registry

from mrla_mm.errors import did_you_mean


def find_typo(error: KeyError | TypeError) -> str:
    """Return a line with the nearest name if a config names an unknown type or argument."""
    return find_unknown_type(error) or find_unknown_argument(error)


def find_unknown_type(error: KeyError | TypeError) -> str:
    """Return a line for a type that is in no registry of its kind; an empty text for no such."""
    said = str(error)
    if said == "None is not a callable object":  # mmengine's of an optimizer
        for frame, _ in walk_tb(error.__traceback__):
            if optimizer := frame.f_locals.get("optimizer_cfg"):
                said = f"{optimizer['type']} is not in the mmengine::optimizer registry"
    match = re.search(r"(\w+) is not in the \S+?::(.+?) registry", said)
    if not match:
        return ""
    name, kind = match.groups()
    roots = [each for each in vars(registry).values() if getattr(each, "name", "") == kind]
    families = [each for root in roots for each in (root, *root.children.values())]
    hint = did_you_mean(name, {known for each in families for known in each.module_dict})
    return f"there is no {kind} {name!r}{hint}" if hint else ""


def find_unknown_argument(error: KeyError | TypeError) -> str:
    """Return a line for an argument that a config has and its class has not; or an empty text."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    built, arguments = find_built(error.__traceback__)
    if not match or match[1] not in arguments:
        return ""
    classes = inspect.getmro(built) if inspect.isclass(built) else ()
    functions = [each.__init__ for each in classes] or [built]
    parameters = [inspect.signature(each).parameters for each in functions]
    hint = did_you_mean(match[1], {name for each in parameters for name in each})
    return f"{built.__name__} has no argument {match[1]!r}{hint}" if hint else ""


def find_built(traceback: TracebackType | None) -> tuple[object, dict]:
    """Return what mmengine was building last when an error came, and its arguments."""
    found = None, {}
    for frame, _ in walk_tb(traceback):
        if frame.f_code.co_name == "build_from_cfg":
            found = frame.f_locals.get("obj_cls"), frame.f_locals.get("args", {})
    return found
