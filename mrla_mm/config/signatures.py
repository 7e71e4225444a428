"""Which keyword arguments a class or function takes, where its source tells."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import NamedTuple

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
READS = ("get", "items", "keys", "values")  # methods that leave a dictionary as it is
HOSTS = ("mmengine", "mmcv", "mmdet", "mmpretrain", "mrla_mm", "torch", "torchvision")


class Accepted(NamedTuple):
    """Keyword arguments: those that are known by name, and whether there may be others."""

    names: frozenset[str]
    others: bool


def from_host(kind: object) -> bool:
    """Whether a class or function is a host's or ours, and no user's."""
    return callable(kind) and str(kind.__module__).split(".")[0] in HOSTS


def is_ours(kind: object) -> bool:
    """Whether a class or function is this package's."""
    return callable(kind) and str(kind.__module__).split(".")[0] == "mrla_mm"


@functools.lru_cache(maxsize=1024)
def accepted(kind: Callable) -> Accepted:
    """Return the keyword arguments of a class or function.

    A class that hands its `**kwargs` on to its parent, untouched, takes the parent's arguments and no others; any
    other use of them, or a decorator, which may rename arguments, leaves open what else it takes.
    """
    if not inspect.isclass(kind):
        names, rest, decorated = named(kind)
        return Accepted(names, rest is not None or decorated)
    names, others = frozenset(), False
    for parent in kind.__mro__[:-1]:
        start = vars(parent).get("__init__")
        if start is None:
            continue
        more, rest, decorated = named(start)
        names |= more - {"self"}
        others |= decorated
        if rest is None:
            return Accepted(names, others)
        if not hands_on(start, rest):
            return Accepted(names, True)
    return Accepted(names, True)


def named(function: Callable) -> tuple[frozenset[str], str | None, bool]:
    """Return the names of a function's keyword arguments, that of its `**kwargs` or None, and if it is decorated."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), "kwargs", False
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), None)
    return frozenset(each.name for each in parameters if each.kind in NAMED), rest, hasattr(function, "__wrapped__")


def hands_on(function: Callable, rest: str) -> bool:
    """Whether an `__init__` gives its `**rest` to its parent's, and neither takes anything out of it nor adds to it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    owner = function.__qualname__.split(".")[-2:][0]  # a class that names another one skips parents
    starts = ("super().__init__", f"super({owner}, self).__init__")
    harmless, to_parent = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [key.value for key in node.keywords if key.arg is None and is_name(key.value, rest)]
            harmless |= set(map(id, given))
            to_parent |= bool(given) and ast.unparse(node.func) in starts
        elif isinstance(node, ast.Dict):
            harmless |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
        elif isinstance(node, ast.Subscript | ast.Attribute) and getattr(node, "attr", "get") in READS:
            harmless |= {id(node.value)} if isinstance(node.ctx, ast.Load) else set()
        elif isinstance(node, ast.Compare):
            harmless |= set(map(id, node.comparators))
    uses = [node for node in ast.walk(tree) if is_name(node, rest)]
    return to_parent and all(id(node) in harmless for node in uses)


def is_name(node: ast.AST, name: str) -> bool:
    """Whether a piece of source is the variable of this name."""
    return isinstance(node, ast.Name) and node.id == name
