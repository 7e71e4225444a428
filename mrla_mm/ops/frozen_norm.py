"""Batch norm with frozen statistics, a linear function of each channel."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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

    def scale(self) -> Tensor:
        """Derivative of the channels (C,)."""
        inverse = torch.rsqrt(self.variance + self.eps)
        return inverse if self.weight is None else inverse * self.weight

    def gradients(self, grad: Tensor, c: Tensor, needed: list[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of c, weight and bias, those that are needed."""
        mean, variance, weight, _, eps = self
        if not any(needed):
            return None, None, None
        if c.numel() == 0:  # on which PyTorch's function ends the process
            return tuple(torch.zeros_like(t) if need else None for t, need in zip((c, mean, mean), needed, strict=True))
        backward = torch.ops.aten.native_batch_norm_backward
        return backward(grad, c, weight, mean, variance, None, None, False, eps, needed)

    def fold(self) -> tuple[Tensor, Tensor]:
        """Scale and offset of the channels, (C,) each, with the gradients of weight and bias."""
        return FoldFunction.apply(*self)


class FoldFunction(torch.autograd.Function):
    """scale = weight / sqrt(variance + eps), offset = bias - mean scale, as one step of autograd."""

    @staticmethod
    def forward(ctx, mean, variance, weight, bias, eps):
        """Fold: (C,) each."""
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(mean, inverse)
        scale = inverse if weight is None else inverse * weight
        return scale, -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, by_scale, by_offset):
        """Compute the gradients of weight and bias."""
        mean, inverse = ctx.saved_tensors
        by_weight = None
        if ctx.needs_input_grad[2]:
            by_weight = torch.addcmul(by_scale, mean, by_offset, value=-1) * inverse
        return None, None, by_weight, by_offset if ctx.needs_input_grad[3] else None, None
