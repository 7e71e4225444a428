"""What arguments and feature maps must be, so that a wrong one is named before the code below ends on it."""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import NamedTuple

import torch
from mmengine.registry import MODELS, WEIGHT_INITIALIZERS, Registry
from torch import Tensor

from mrla_mm.errors import InputError

SHOWN = 200  # characters of a value that a message shows
LISTED = 12  # names that a message lists
# What some backbones have and others have not, with what to do there; no name near it would be meant.
INSTEAD = {
    "arch": "its size is set by depth",
    "depth": "its size is set by arch",
    "norm_eval": "it has no batch norms whose statistics could be kept; drop it",
    "pretrained": "name the file by init_cfg=dict(type='Pretrained', checkpoint=...)",
}


class Rule(NamedTuple):
    """What a value must be, in words that follow "must be", and as a test."""

    words: str
    holds: Callable[[object], bool]


def is_whole(value: object, low: int, high: float = float("inf")) -> bool:
    """Whether a value is a whole number between two, both included."""
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> bool:
    """Whether a value, of JSON for example, is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_list(value: object) -> bool:
    """Whether a value is a list, a tuple or a range, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def whole(low: int, high: int | None = None) -> Rule:
    """Rule of whole numbers, both ends included."""
    words = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return Rule(words, lambda value: is_whole(value, low, float("inf") if high is None else high))


def wholes(low: int, count: int) -> Rule:
    """Rule of lists of so many whole numbers."""
    return Rule(
        f"a list of {count} whole numbers of at least {low}",
        lambda value: is_list(value) and len(value) == count and all(is_whole(item, low) for item in value),
    )


def indices(count: int) -> Rule:
    """Rule of lists of different indices below `count`, ascending, as outputs follow each other."""
    return Rule(
        f"a list of ascending indices from 0 to {count - 1}",
        lambda value: (
            is_list(value)
            and len(value) > 0
            and all(is_whole(item, 0, count - 1) for item in value)
            and list(value) == sorted(set(value))
        ),
    )


def one_of(*choices: str) -> Rule:
    """Rule of names."""
    return Rule(f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices)


def optional(rule: Rule) -> Rule:
    """Rule that None keeps too."""
    return Rule(f"None or {rule.words}", lambda value: value is None or rule.holds(value))


def is_map_norm(value: object) -> bool:
    """Whether a value may be the config of a norm of feature maps."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    with MODELS.switch_scope_and_registry(None) as registry:  # where mmcv looks norms up
        known = registry.get(kind) is not None if isinstance(kind, str) else kind is not None
    return known and kind not in ("LN", "BN1d", "BN3d", "IN1d", "IN3d")


def is_init(value: object) -> bool:
    """Whether a value may be an `init_cfg`: the config of a known initialiser, a list of them, or None."""
    if is_list(value):
        return all(isinstance(item, Mapping) and is_init(item) for item in value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    with WEIGHT_INITIALIZERS.switch_scope_and_registry(None) as registry:  # where mmengine looks them up
        known = registry.get(kind) is not None if isinstance(kind, str) else isinstance(kind, type)
    return value is None or known


FLAG = Rule("True or False", lambda value: isinstance(value, bool))
NUMBER = Rule("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool) and value == value)
RATE = Rule("a probability in [0, 1)", lambda value: NUMBER.holds(value) and 0 <= value < 1)
PIXELS = Rule(  # one for both sides, or (height, width)
    "a whole number of at least 1, or two of them", lambda value: is_whole(value, 1) or wholes(1, 2).holds(value)
)
CONFIG = Rule("a dict with a type", lambda value: isinstance(value, Mapping) and "type" in value)
DICT = Rule("a dict", lambda value: isinstance(value, Mapping))
INIT = Rule("None, the config of an initialiser of mmengine, or a list of them", is_init)
MAP_NORM = Rule("the config of a norm of feature maps, such as dict(type='BN')", is_map_norm)


def check_arguments(arguments: Mapping[str, object], rules: Mapping[str, Rule]) -> None:
    """Raise InputError naming the first argument that breaks its rule; one without a rule passes."""
    for name, value in arguments.items():
        if name in rules and not rules[name].holds(value):
            raise InputError(f"{name}={shown(value)} must be {rules[name].words}")


def check_keywords(cls: type, keywords: Iterable[str]) -> None:
    """Raise InputError for a keyword that no constructor of a class or its parents has, with the nearest there is.

    For a constructor that hands its `**kwargs` on; they may name any argument of its parents.
    """
    known = keywords_of(cls)
    for name in keywords:
        if name not in known:
            raise InputError(f"{cls.__name__} has no argument {name!r}{instead(name, known)}")


def parameters_of(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of the constructors of a class and its parents, the class's own last."""
    starts = [vars(parent)["__init__"] for parent in reversed(cls.__mro__[:-1]) if "__init__" in vars(parent)]
    return [each for start in starts for each in inspect.signature(start).parameters.values()]


def keywords_of(cls: type) -> set[str]:
    """Return the keywords that the constructors of a class and its parents take by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name for each in parameters_of(cls) if each.kind in kinds} - {"self"}


def argument_defaults(cls: type) -> dict[str, object]:
    """Return the values that a class's arguments, its parents' included, have where they are not given."""
    return {each.name: each.default for each in parameters_of(cls) if each.default is not each.empty}


def instead(name: str, known: Iterable[str]) -> str:
    """Return "; " and what to write in place of an argument that one of our classes does not have."""
    return f"; {INSTEAD[name]}" if name in INSTEAD else nearest(name, known)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "; known are ..." where none is near."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known[:LISTED])}{', ...' if len(known) > LISTED else ''}" if known else ""


def placed(path: str, message: str, keys: Iterable[str]) -> str:
    """Return an error's message with the place in a config that it is about, of the key it begins with if it does."""
    key = re.match(r"(\w+)[.=:]", message)
    return f"{path}.{message}" if key and key[1] in keys else f"{path}: {message}"


def type_name(kind: object) -> str:
    """Return the name that a `type` of a config means, without its package.

    Configs that import classes hold a class there; saved, they hold its full path. A scope may precede a name.
    """
    return getattr(kind, "__name__", str(kind)).rpartition(".")[2]


def class_of(part: object, scope: str | None, registry: Registry = MODELS) -> object:
    """Return the class that a part of a config means by its `type`, None where it is not known."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return kind
    if not kind or kind.startswith("."):  # which mmengine takes for a relative import
        return None
    with registry.switch_scope_and_registry(part.get("_scope_") or scope) as here:
        return here.get(kind)


def shown(value: object, limit: int = SHOWN) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


@contextmanager
def naming(owner: object, arguments: Mapping[str, object]) -> Iterator[None]:
    """Name the arguments given in place of an error from deep inside a host, which does not.

    Raises:
        InputError: for any error but those that name a value, or one of these arguments as a keyword, already.
    """
    try:
        yield
    except Exception as error:
        named = re.findall(r"keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else []
        if isinstance(error, InputError):
            raise
        if twice := [name for name in named if name in arguments and "multiple values" in str(error)]:
            raise InputError(f"{type(owner).__name__} sets {twice[0]} itself; drop it") from error
        if set(named) & set(arguments):
            raise
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments.items()) or "no arguments"
        raise InputError(
            f"{type(owner).__name__} cannot be built with {given}: {type(error).__name__}: {shown(str(error))[1:-1]}"
        ) from error


def check_maps(x: Tensor, channels: int, *, what: str = "images") -> None:
    """Raise InputError unless x is a batch of images or maps (B, channels, H, W) of floating-point numbers."""
    if torch.jit.is_tracing():  # where sizes are tensors
        return
    if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < 1:
        raise InputError(f"expected {what} of shape (B, {channels}, H, W) with H and W above 0, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise InputError(f"expected {what} of floating-point numbers, got {x.dtype}; convert and normalise them first")
