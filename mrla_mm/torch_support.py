"""Newer parts of torch, or what older releases have instead: the one place that asks.

The oldest torch that works throughout is 2.1.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

_compiler = getattr(torch, "compiler", None)
# Dynamo knows these functions by identity, so they are not wrapped.
is_compiling = getattr(_compiler, "is_compiling", None) or torch._utils.is_compiling
is_dynamo_compiling = getattr(_compiler, "is_dynamo_compiling", None) or is_compiling
# Whether weights_only reads types allowed under a name of one's own choice; from then on it is
# torch.load's default.
has_named_safe_globals = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a type of device."""
    if hasattr(torch.amp, "is_autocast_available"):
        return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
            device_type
        )
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def safe_globals(types: Sequence[type]) -> AbstractContextManager:
    """Let weights_only read these types too, where torch has a list of them."""
    known = getattr(torch.serialization, "safe_globals", None)
    return known(list(types)) if known else nullcontext()
