"""Listening to the layer attention of a model as it runs."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.attention.tokens import to_map
from mrla_mm.errors import InputError


class BranchListener:
    """Context within which `hear` is called after every layer-attention branch of a model, in the order they run.

    Attributes:
        branches: residual branches by their name in the model.
        stage_names: names of the branches of each stage, in the order of the layers, as far as they have run.

    Raises:
        InputError: the model has no layer attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self.branches = {n: m for n, m in model.named_modules() if isinstance(m, LayerAttentionResidual)}
        if not self.branches:
            raise InputError(f"{type(model).__name__} has no layer attention to look at")
        self.stage_names: list[list[str]] = []
        self._handles = []

    def __enter__(self) -> "BranchListener":
        """Start to listen."""
        for name, branch in self.branches.items():
            self._handles.append(branch.register_forward_hook(self._listen(name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        """Stop to listen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def hear(self, name: str, branch: LayerAttentionResidual, given: dict, result: tuple) -> None:
        """Take what a branch was given, by argument name, and what it returned."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what is kept from one layer to the next."""

    def _listen(self, name: str) -> Callable:
        def hook(branch, args, kwargs, result):
            if not any(name in stage for stage in self.stage_names):
                if branch.attention.first_in_stage or not self.stage_names:
                    self.stage_names.append([])
                self.stage_names[-1].append(name)
            with torch.no_grad():
                self.hear(name, branch, inspect.signature(branch.forward).bind(*args, **kwargs).arguments, result)

        return hook


def attended_map(branch: LayerAttentionResidual, given: dict) -> Tensor:
    """Return the map (B, C, H, W) that a branch hands its attention, from the arguments it was given."""
    x = next(iter(given.values()))
    if isinstance(branch, TokenAttentionResidual):
        return to_map(branch.norm(x)[:, branch.extra_tokens :], given["grid"])
    return x
