"""Activation checkpointing as the backbones' `with_cp` has it."""

from collections.abc import Callable

from torch import is_grad_enabled
from torch.utils.checkpoint import checkpoint


def run_checkpointed(with_cp: bool, function: Callable, *args: object) -> object:
    """Call a function; with_cp saves its arguments and computes it again in the backward pass."""
    if with_cp and is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False)
    return function(*args)
