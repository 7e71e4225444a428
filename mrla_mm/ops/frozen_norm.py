"""Batch norm with frozen statistics, a linear function of each channel."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.ops.gating import wide


class FrozenNorm(NamedTuple):
    """Batch norm with frozen statistics: weight (c - mean) / sqrt(variance + eps) + bias, tensors of shape (C,).

    mean and variance take no gradient; weight and bias may be None for 1 and 0.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def fold(self) -> tuple[Tensor, Tensor]:
        """Scale and offset of the channels, (C,) each, in at least single precision; weight and bias learn by them."""
        return FoldFunction.apply(*self)


class FoldFunction(torch.autograd.Function):
    """scale = weight / sqrt(variance + eps), offset = bias - mean scale, as one step of autograd."""

    @staticmethod
    def forward(ctx, mean, variance, weight, bias, eps):
        """Fold: (C,) each."""
        mean, weight, bias = wide(mean), wide(weight), wide(bias)
        inverse = torch.rsqrt(wide(variance) + eps)
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
