"""What the autograd Functions of fused layer attention share.

Their options and saved tensors, a batch norm in training, the layout that maps are computed in, and
which gradients a backward pass may add to.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.ops.coefficients import Layer, Parameters, Saved
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import SELF_CHECKS, Form, Outcome, prove
from mrla_mm.ops.reference import BatchNorm

# Does what `without_autocast` does at a tenth of its cost.
DisableAutocast = torch._C._DisableAutocast


class Options(NamedTuple):
    """What a Function is given besides tensors.

    A batch norm in training is applied to what the passes write; a frozen norm is part of the
    `Layer` that they compute. Weight, bias and keep of both are parameters.
    """

    form: Form  # of the layer
    eps: float  # of its norm
    training_norm: BatchNorm | None
    outcome: Outcome | None  # of the path's self-check, None if it needs none

    @classmethod
    def after_self_check(
        cls, path: str, c: Tensor, parameters: Parameters, norm: BatchNorm | None, **others: object
    ) -> "Options":
        """Check the path for a map c (B, C, H, W); `others` are the other fields of its `Form`."""
        form = Form(
            path=path,
            device=c.device,
            dtype=c.dtype,
            channels_last=not c.is_contiguous(),
            shape=c.shape,
            kernel_size=0 if parameters.query is None else parameters.query.shape[-1],
            dtypes=tuple([None if tensor is None else tensor.dtype for tensor in parameters]),
            **others,
        )
        outcome = prove(form, passes_of(path)) if path in SELF_CHECKS else None
        eps = 0.0 if norm is None else norm.eps
        training_norm = norm if norm is not None and norm.momentum is not None else None
        return cls(form, eps, training_norm, outcome)

    def layer(self, parameters: Parameters) -> Layer:
        """The layer with these options and parameters."""
        weights, norm = parameters.weights(), parameters.frozen_norm(self.eps)
        return Layer(weights, norm, **self.form.settings(), is_mla=self.form.is_mla)

    def has_failed(self) -> bool:
        """Whether the path failed its self-check, or failed since."""
        return self.outcome is not None and self.outcome.failure != ""

    def passes(self) -> Passes:
        """The passes over maps that the layer runs."""
        return passes_of(self.form.path, self.outcome)


def save_for_backward(
    ctx, options: Options, parameters: Parameters, saved: Saved, maps: Sequence[Tensor | None]
) -> None:
    """Save what `load_saved` returns; autograd takes one flat sequence of tensors."""
    ctx.options = options
    ctx.save_for_backward(*parameters, *saved, *maps)


def load_saved(ctx) -> tuple[Layer, Saved, Sequence[Tensor | None]]:
    """The layer of the saved options and parameters, and what else was saved."""
    tensors = iter(ctx.saved_tensors)
    layer = ctx.options.layer(Parameters._make(islice(tensors, len(Parameters._fields))))
    saved = Saved._make(islice(tensors, len(Saved._fields)))
    return layer, saved, list(tensors)


def batch_norm_residual(
    out: Tensor, norm: BatchNorm | None, *, residual: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return residual + keep norm(out), and mean and inverse deviation of out (C,).

    The running statistics are updated. Without a norm out itself is returned.
    """
    if norm is None:
        return out, None, None
    y, mean, inverse_deviation = torch.native_batch_norm(
        out, norm.weight, norm.bias, norm.mean, norm.variance,
        training=True, momentum=norm.momentum, eps=norm.eps,
    )  # fmt: skip
    if norm.keep is not None:
        y.mul_(norm.keep.to(y.dtype)[:, None, None, None])
    return y.add_(residual), mean, inverse_deviation


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    norm: BatchNorm | None,
    statistics: Sequence[Tensor | None],
    recompute: Callable[..., object],
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Gradient of o (B, C, H, W), given that of y; and gradients of the norm's parameters by name.

    Without a norm y is o. The statistics are what `batch_norm_residual` returned beside y, and
    `recompute` writes o to its argument out, a map like x.
    """
    if norm is None:
        return grad, {}
    out = torch.empty_like(x)
    recompute(out=out)
    if norm.keep is not None:
        grad = grad * norm.keep.to(grad.dtype)[:, None, None, None]
    grad_out, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, out, norm.weight, None, None, *statistics, train=True, eps=norm.eps,
        output_mask=(True, norm.weight is not None, norm.bias is not None),
    )  # fmt: skip
    # torch returns another layout if x has odd strides in a dimension of size 1
    return match_layout(grad_out, x), dict(norm_weight=grad_weight, norm_bias=grad_bias)


def refuse_second_derivative() -> None:
    """Raise RuntimeError if autograd records a backward pass: its gradient would be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused layer attention has no second derivative; set MRLA_OPS=naive in the environment"
        )


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
    """Tensor in the precision and layout of a dense x; InputError if it is of another shape."""
    if tensor.shape == x.shape and tensor.stride() == x.stride() and tensor.dtype == x.dtype:
        return tensor  # what follows would return it too, in ten times the time
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
    """Label the gradients that a node returns for its last inputs with the nodes that get them.

    A Function's ctx is its node of the graph. Its next_functions leave out inputs that are None, so
    the last inputs are counted from the end.
    """
    receivers = reversed(ctx.next_functions)
    for gradient, (receiver, _) in zip(reversed(gradients), receivers, strict=False):
        gradient.receiver = receiver


def writable_gradient(gradient: Tensor | None, x: Tensor, ctx) -> Tensor:
    """Gradient of a value, which node ctx may add to: as it came with ctx's label, else a copy.

    Zeros where later layers have none.
    """
    if gradient is None:
        return torch.zeros_like(x)
    matched = match_layout(gradient, x)
    is_writable = matched is not gradient or getattr(gradient, "receiver", None) is ctx
    return matched if is_writable else matched.clone()
