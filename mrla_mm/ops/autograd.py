"""What the autograd Functions of fused layer attention share.

Their options and saved tensors, a batch norm in training, the layout that maps are computed in, and
which gradients a backward pass may add to.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.ops.coefficients import Attention, Coefficients, Layer, Parameters, Saved
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import SELF_CHECKS, Form, Outcome, prove
from mrla_mm.ops.reference import BatchNorm, without_autocast


class Options(NamedTuple):
    """What a Function is given besides tensors; see `light_fused` and `Layer`.

    `batch_norm` is a norm in training, which is applied to what the passes write; a frozen one is
    part of the `Layer` that they compute. The weight, bias and keep of both are in `Parameters`.
    """

    path: str
    heads: int
    eps: float
    add_relu: bool
    has_history: bool = False
    is_mla: bool = False
    batch_norm: BatchNorm | None = None
    outcome: Outcome | None = None

    def layer(self, parameters: Parameters) -> Layer:
        """The layer with these options and parameters."""
        return Layer(
            parameters.weights(),
            parameters.norm(self.eps),
            self.heads,
            has_history=self.has_history,
            add_relu=self.add_relu,
        )

    def prove(self, c: Tensor, parameters: Parameters, depth: int = 0) -> "Options":
        """Options with the outcome of the path's proof, if it needs one, for a layer on map c."""
        if self.path not in SELF_CHECKS:
            return self
        form = Form(
            path=self.path,
            device=c.device,
            dtype=c.dtype,
            channels_last=not c.is_contiguous(),
            shape=c.shape,
            heads=self.heads,
            add_relu=self.add_relu,
            has_history=self.has_history,
            is_mla=self.is_mla,
            depth=depth,
            kernel_size=0 if parameters.query is None else parameters.query.shape[-1],
            dtypes=tuple([None if tensor is None else tensor.dtype for tensor in parameters]),
        )
        return self._replace(outcome=prove(form, self.passes()))

    def has_failed(self) -> bool:
        """Whether the path did not prove itself, or failed since."""
        return self.outcome is not None and self.outcome.failure != ""

    def passes(self) -> Passes:
        """The passes over maps that the layer runs."""
        return passes_of(self.path, self.outcome)


def save(ctx, saved: Saved, parameters: Parameters, maps: Sequence[Tensor | None]) -> None:
    """Save for backward what `load` returns; autograd takes one flat sequence of tensors."""
    ctx.save_for_backward(*saved.attention, *saved.coefficients, *parameters, *maps)


def load(ctx) -> tuple[Saved, Parameters, Sequence[Tensor | None]]:
    """What `save` was given."""
    tensors = iter(ctx.saved_tensors)
    attention = Attention(*islice(tensors, len(Attention._fields)))
    coefficients = Coefficients(*islice(tensors, len(Coefficients._fields)))
    parameters = Parameters(*islice(tensors, len(Parameters._fields)))
    return Saved(attention, coefficients), parameters, tuple(tensors)


def add_batch_norm(
    x: Tensor, out: Tensor, parameters: Parameters, norm: BatchNorm | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x + keep norm(o), mean and inverse deviation of o (C,); update running statistics.

    Without a norm it is o that is returned, (B, C, H, W) as x is.
    """
    if norm is None:
        return out, None, None
    y, mean, inverse_deviation = torch.native_batch_norm(
        out, parameters.norm_weight, parameters.norm_bias, norm.mean, norm.variance,
        True, norm.momentum, norm.eps,
    )  # fmt: skip
    if parameters.keep is not None:
        y.mul_(parameters.keep.to(y.dtype)[:, None, None, None])
    return y.add_(x), mean, inverse_deviation


def batch_norm_backward(
    grad: Tensor,
    out: Tensor,
    parameters: Parameters,
    norm: BatchNorm,
    statistics: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o (B, C, H, W) and of the norm's weight and bias (C,), given that of y.

    The statistics are those that `add_batch_norm` returned.
    """
    if parameters.keep is not None:
        grad = grad * parameters.keep.to(grad.dtype)[:, None, None, None]
    return torch.ops.aten.native_batch_norm_backward(
        grad, out, parameters.norm_weight, None, None, *statistics, True, norm.eps,
        (True, parameters.norm_weight is not None, parameters.norm_bias is not None),
    )  # fmt: skip


def refuse_second_derivative() -> None:
    """Raise RuntimeError if autograd records a backward pass: its gradient would be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused layer attention has no second derivative; set MRLA_OPS=naive in the environment"
        )


def disable_autocast(x: Tensor) -> AbstractContextManager:
    """Do what `without_autocast` does at a tenth of its cost, where torch can (from 2.1 on)."""
    guard = torch._C._DisableAutocast
    return guard() if hasattr(guard, "__enter__") else without_autocast(x)


def dense_format(x: Tensor) -> torch.memory_format:
    """Layout that the maps are computed in: that of x where it is one of the two dense ones.

    The patches behind a class token are channels-last but for the gap between samples: they are
    copied, not transposed, except on a CPU, whose passes are several times as fast on contiguous
    maps.
    """
    if x.is_contiguous():
        return torch.contiguous_format
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    patches = x.device.type != "cpu" and x.stride(1) == 1
    return torch.channels_last if channels_last or patches else torch.contiguous_format


def match_layout(tensor: Tensor, x: Tensor) -> Tensor:
    """Tensor in the precision and layout of x; InputError if it is of another shape."""
    if tensor.shape != x.shape:
        raise InputError(
            f"maps of a stage must have one shape, got {tuple(tensor.shape)} and {tuple(x.shape)}"
        )
    return tensor.to(x.dtype).contiguous(memory_format=dense_format(x))


# Every layer of a stage adds in place to the gradients of all earlier values: T values cost T maps,
# not T^2. A node may write only to a map that nobody else holds. So a layer's backward pass labels
# each gradient that it returns with the node that autograd hands it to, its `receiver`. A gradient
# that arrives at a node with that node's label came straight from a later layer, for it alone:
#   - if others use the value too, what arrives is the sum of their gradients, a new tensor;
#   - a node between two layers, which might hand one tensor to several inputs as an addition does,
#     is the receiver in the label.


def label_receivers(gradients: Sequence[Tensor], ctx) -> None:
    """Label the gradients that a node returns for its last inputs with the nodes that get them."""
    receivers = reversed(ctx.next_functions)
    for gradient, (receiver, _) in zip(reversed(gradients), receivers, strict=False):
        gradient.receiver = receiver


def writable_gradient(gradient: Tensor | None, x: Tensor, ctx) -> Tensor:
    """Gradient of a value, which node ctx may add to: as it came with ctx's label, else a copy."""
    if gradient is None:
        return torch.zeros_like(x)
    matched = match_layout(gradient, x)
    is_writable = matched is not gradient or getattr(gradient, "receiver", None) is ctx
    return matched if is_writable else matched.clone()
