"""Newer parts of torch, or their substitutes in older releases.

The oldest torch that works throughout is 2.1.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from mrla_mm import restricted_pickle

# Dynamo knows these functions by identity, so they are not wrapped.
is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
is_autocast_available = getattr(torch.amp, "is_autocast_available", None)
# Whether weights_only reads types allowed under a name of one's own choice; from then on it is
# torch.load's default.
has_named_safe_globals = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
_ALLOWED: dict[str, object] = {}


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a type of device."""
    if is_autocast_available is not None:
        return is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def add_safe_globals(types: Sequence[tuple[object, str]]) -> None:
    """Let `load_weights_only` read these types and functions under these names from now on.

    Where torch has a list of them, `torch.load` reads them too.
    """
    if has_named_safe_globals:
        torch.serialization.add_safe_globals(list(types))
    _ALLOWED.update((name, allowed) for allowed, name in types)


def load_weights_only(path: str | Path, more: Sequence[type] = ()) -> object:
    """Load tensors, plain values and what is allowed onto the CPU, executing nothing else.

    Raises UnpicklingError naming what else the file asks for.
    """
    if has_named_safe_globals:
        theirs = torch.serialization.get_safe_globals()  # which the end of the block would remove
        with torch.serialization.safe_globals([each for each in more if each not in theirs]):
            return torch.load(path, map_location="cpu", weights_only=True)
    named = {f"{each.__module__}.{each.__qualname__}": each for each in more}
    return restricted_pickle.load(path, _ALLOWED | named)
