"""Newer parts of torch, or their substitutes in older releases.

The oldest torch that works throughout is 2.1.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

# Dynamo knows these functions by identity, so they are not wrapped.
is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
is_autocast_available = getattr(torch.amp, "is_autocast_available", None)
# Whether weights_only reads types allowed under a name of one's own choice; from then on it is
# torch.load's default.
has_named_safe_globals = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a type of device."""
    if is_autocast_available is not None:
        return is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def add_safe_globals(types: Sequence[tuple[object, str]]) -> None:
    """Let `torch.load` read these types and functions under these names from now on."""
    if has_named_safe_globals:
        torch.serialization.add_safe_globals(list(types))


def load_weights_only(path: str | Path, more: Sequence[type] = ()) -> object:
    """Load tensors, plain values and what is allowed onto the CPU, executing nothing else.

    Torch before 2.6 cannot do so with mmengine's checkpoints: there, as by mmengine and torch, what
    the file holds is executed. Raises UnpicklingError naming what else the file asks for.
    """
    if not has_named_safe_globals:
        return torch.load(path, map_location="cpu", weights_only=False)
    theirs = torch.serialization.get_safe_globals()  # which the end of the block would remove
    with torch.serialization.safe_globals([each for each in more if each not in theirs]):
        return torch.load(path, map_location="cpu", weights_only=True)
