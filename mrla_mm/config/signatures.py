"""Which keyword arguments a class or function takes, where its source tells."""

import ast
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SHOWN = 12  # names that a message lists


@functools.lru_cache(maxsize=1024)
def accepted(kind: Callable) -> frozenset[str] | None:
    """Return the keyword arguments of a class or function, None where any name may be one.

    A class that hands its `**kwargs` on to its parent, untouched, takes the parent's arguments as well.
    """
    if not inspect.isclass(kind):
        names, rest = named(kind)
        return None if rest else names
    names = frozenset()
    for parent in kind.__mro__:
        start = vars(parent).get("__init__")
        if start is None:
            continue
        more, rest = named(start)
        if more is None:
            return None
        names |= more - {"self"}
        if rest is None:
            return names
        if not hands_on(start, rest):
            return None
    return None


def named(function: Callable) -> tuple[frozenset[str] | None, str | None]:
    """Return the names of a function's keyword arguments, and that of its `**kwargs`, None where it has none.

    Those of a decorated function are not known: decorators rename old arguments.
    """
    if hasattr(function, "__wrapped__"):
        return None, "kwargs"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, "kwargs"
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), None)
    return frozenset(each.name for each in parameters if each.kind in NAMED), rest


def hands_on(function: Callable, rest: str) -> bool:
    """Whether an `__init__` gives its `**rest` to its parent's, and neither takes anything out of it nor adds to it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    owner = function.__qualname__.split(".")[-2:][0]  # a class that names another one skips parents
    starts = ("super().__init__", f"super({owner}, self).__init__")
    unpacked, to_parent = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [key.value for key in node.keywords if key.arg is None and is_name(key.value, rest)]
            unpacked |= set(map(id, given))
            to_parent |= bool(given) and ast.unparse(node.func) in starts
        elif isinstance(node, ast.Dict):
            unpacked |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            unpacked.add(id(node.value))
    uses = [node for node in ast.walk(tree) if is_name(node, rest)]
    return to_parent and all(id(node) in unpacked for node in uses)


def is_name(node: ast.AST, name: str) -> bool:
    """Whether a piece of source is the variable of this name."""
    return isinstance(node, ast.Name) and node.id == name


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "; known are ..." where none is near."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known[:SHOWN])}{', ...' if len(known) > SHOWN else ''}" if known else ""
