"""The end of a residual block with MRLA-light as one function for autograd, so that less is kept for backward.

    x = relu(norm(c) + shortcut),    y = x + keep (scale (gate dw(x) + lambda shortcut) + offset)

c is the last convolution's output, norm a batch norm with frozen statistics. A plain block keeps c and y; computed step
by step, attention and ReLU keep x too. Here x is computed again in backward, from c and the shortcut.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.ops.folded import chunks, on_grid
from mrla_mm.ops.fused import light_gradients, light_values, like, memory_format
from mrla_mm.ops.gating import Affine, LightWeights, fold_slope


class FrozenNorm(NamedTuple):
    """Batch norm with frozen statistics: weight (c - mean) / sqrt(variance + eps) + bias, tensors of shape (C,).

    mean and variance take no gradient; weight and bias may be None for 1 and 0.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, c: Tensor) -> Tensor:
        """Normalise (B, C, H, W)."""
        mean, variance, weight, bias, eps = self
        return F.batch_norm(c, mean, variance, weight, bias, eps=eps)

    def gradients(self, grad: Tensor, c: Tensor, needed: list[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of c, weight and bias, those that are needed."""
        mean, variance, weight, _, eps = self
        backward = torch.ops.aten.native_batch_norm_backward
        return backward(grad, c, weight, mean, variance, None, None, False, eps, needed)


def activate(c: Tensor, shortcut: Tensor, norm: FrozenNorm) -> Tensor:
    """Compute x = relu(norm(c) + shortcut), (B, C, H, W), in one pass over memory."""
    x = torch.empty_like(c)
    for samples in chunks(c):
        torch.add(norm(c[samples]), shortcut[samples], out=x[samples]).relu_()
    return x


class LightBlockEnd(torch.autograd.Function):
    """See the module; of the size of a map, c and the shortcut are kept for backward and nothing else."""

    @staticmethod
    def forward(ctx, path, heads, history, eps, c, shortcut, *tensors):
        """Compute y (B, C, H, W); tensors: FrozenNorm without eps, LightWeights, Affine."""
        norm, weights, affine = FrozenNorm(*tensors[:4], eps), LightWeights(*tensors[4:8]), Affine(*tensors[8:])
        with torch.autocast(device_type=c.device.type, enabled=False):
            x = activate(c, shortcut, norm)
        y, pooled, gate = light_values(path, heads, x, shortcut if history else None, weights, affine)
        ctx.save_for_backward(c, shortcut, pooled, gate, *tensors)
        ctx.path, ctx.history, ctx.eps = path, history, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and all tensors but the statistics and keep."""
        c, shortcut, pooled, gate, *tensors = ctx.saved_tensors
        norm, weights, affine = FrozenNorm(*tensors[:4], ctx.eps), LightWeights(*tensors[4:8]), Affine(*tensors[8:])
        needs_c, needs_shortcut, _, _, *needs_norm = ctx.needs_input_grad[4:10]
        previous, needs_small = shortcut if ctx.history else None, any(ctx.needs_input_grad[10:])
        with torch.autocast(device_type=c.device.type, enabled=False):
            x, grad = activate(c, shortcut, norm), like(grad, c)
            by_sum, _, by_small = light_gradients(
                ctx.path, grad, x, previous, pooled, gate, weights, affine, small=needs_small, history=False
            )
            torch.ops.aten.threshold_backward.grad_input(by_sum, x, 0, grad_input=by_sum)  # through ReLU, in place
            by_c, by_weight, by_bias = norm.gradients(by_sum, c, [needs_c, *needs_norm])
            if ctx.history and needs_shortcut:
                by_sum.addcmul_(grad, on_grid(fold_slope(c, weights, affine), grad))  # now the shortcut's
        return None, None, None, None, by_c, by_sum, None, None, by_weight, by_bias, *by_small, None


def light_block_end(
    path: str,
    c: Tensor,
    shortcut: Tensor,
    norm: FrozenNorm,
    weights: LightWeights,
    affine: Affine,
    *,
    heads: int,
    history: bool,
) -> Tensor:
    """Fused end of a block by one of the paths."""
    c = c.contiguous(memory_format=memory_format(c))
    mean, variance, weight, bias, eps = norm
    return LightBlockEnd.apply(
        path, heads, history, eps, c, like(shortcut, c), mean, variance, weight, bias, *weights, *affine
    )
