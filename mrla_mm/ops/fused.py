"""Fused layer attention for autograd: what is kept for backward, whichever path computes the maps.

Light keeps x and the history, base keeps the values; both besides only tensors of a few numbers per channel. Products,
gated values and normalised maps are recomputed or never needed. A second derivative is not implemented and raises.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.ops import folded, library
from mrla_mm.ops.gating import (
    Affine,
    LightWeights,
    fold_light,
    per_sample,
    pooled_gate,
    times,
    unfold_light,
    wide,
)


def kernels(path: str) -> ModuleType:
    """Module whose functions compute the maps' part of a path."""
    if path == "triton":
        from mrla_mm.ops import triton

        return triton
    return library if torch.compiler.is_compiling() else folded


def memory_format(x: Tensor) -> torch.memory_format:
    """Layout the maps are computed in, that of x where it is one of the two dense ones."""
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def like(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """Tensor in the precision and the layout of x; itself if it is so already."""
    return None if tensor is None else tensor.to(x.dtype).contiguous(memory_format=memory_format(x))


def cast(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """Gradient in the precision of its tensor."""
    return None if gradient is None or tensor is None else gradient.to(tensor.dtype)


def light_values(
    path: str, heads: int, x: Tensor, previous: Tensor | None, weights: LightWeights, affine: Affine | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Light attention of x, and what of its gate backward needs: y (B, C, H, W), pooled (B, C), gate (B, G)."""
    with torch.autocast(device_type=x.device.type, enabled=False):
        pooled = None if weights.query is None else kernels(path).pool(x)
        gate = None if weights.query is None else pooled_gate(pooled, weights, heads)
        coefficients = fold_light(x, gate, weights, affine, history=previous is not None)
        out = kernels(path).light_forward(x, previous, coefficients, residual=affine is not None)
    return out, pooled, gate


def light_gradients(
    path: str,
    grad: Tensor,
    x: Tensor,
    previous: Tensor | None,
    pooled: Tensor | None,
    gate: Tensor | None,
    weights: LightWeights,
    affine: Affine | None,
    *,
    small: bool,
    history: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of `light_values`: of x, of the history if wanted, and of weights, scale and offset if small."""
    run, residual = kernels(path), affine is not None
    scale, offset, _ = affine or (None, None, None)
    constant, by_small = None, (LightWeights(), None, None)
    with torch.autocast(device_type=x.device.type, enabled=False):
        coefficients = fold_light(x, gate, weights, affine, history=previous is not None)
        if small or gate is not None:
            sums = run.light_sums(grad, x, previous, coefficients.taps.shape[-1], shift=residual)
            constant, *by_small = unfold_light(x, pooled, gate, weights, affine, sums)
        by_x, by_previous = run.light_backward(grad, coefficients, constant, residual=residual, history=history)
    by_weights, by_scale, by_offset = by_small
    pairs = zip([*by_weights, by_scale, by_offset], [*weights, scale, offset], strict=True)
    return by_x, by_previous, [cast(gradient, tensor) for gradient, tensor in pairs]


class LightFunction(torch.autograd.Function):
    """y = [x +] keep (scale (gate dw(x) + lambda p) + offset); see `gating` for the derivation."""

    @staticmethod
    def forward(ctx, path, heads, x, previous, query, key, value, history_scale, scale, offset, keep):
        """Compute y (B, C, H, W); the residual is added if there is a scale."""
        weights = LightWeights(query, key, value, history_scale)
        affine = None if scale is None else Affine(scale, offset, keep)
        out, pooled, gate = light_values(path, heads, x, previous, weights, affine)
        ctx.save_for_backward(x, previous, query, key, value, history_scale, scale, offset, keep, pooled, gate)
        ctx.path = path
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of all tensors but keep."""
        x, previous, *weights, scale, offset, keep, pooled, gate = ctx.saved_tensors
        affine = None if scale is None else Affine(scale, offset, keep)
        needs = dict(small=any(ctx.needs_input_grad[4:10]), history=ctx.needs_input_grad[3])
        by_x, by_previous, by_small = light_gradients(
            ctx.path, like(grad, x), x, previous, pooled, gate, LightWeights(*weights), affine, **needs
        )
        return None, None, by_x, by_previous, *by_small, None


def sum_values(path: str, x: Tensor | None, scores: Tensor, values: Sequence[Tensor], affine: Affine | None) -> Tensor:
    """Sum of scored values (B, C, H, W); x is added if there is an affine."""
    with torch.autocast(device_type=values[0].device.type, enabled=False):
        weights, shift = sum_coefficients(scores, affine, values[0].shape[1])
        return kernels(path).sum_forward(x, weights, shift, values)


def sum_gradients(
    path: str, grad: Tensor, scores: Tensor, values: Sequence[Tensor], affine: Affine | None
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Gradients of `sum_values`: of the scores, of scale and offset, and of each value; that of x is grad itself."""
    channels, run = values[0].shape[1], kernels(path)
    scale, offset, keep = affine or (None, None, None)
    with torch.autocast(device_type=grad.device.type, enabled=False):
        weights, _ = sum_coefficients(scores, affine, channels)
        sums, by_values = run.sum_backward(grad, weights, values)  # (B, C, T)
        by_scale = by_offset = None
        if affine is not None:
            factors = per_sample(keep)
            gates = wide(scores).repeat_interleave(channels // scores.shape[1], dim=1)  # (B, C, T)
            by_scale = times((sums * gates).sum(-1), factors).sum(0)
            by_offset = times(run.pool(grad) * (grad.shape[2] * grad.shape[3]), factors).sum(0)
            sums = sums * times(wide(scale), factors).expand(sums.shape[:2]).unsqueeze(-1)
        by_scores = sums.unflatten(1, (scores.shape[1], -1)).sum(2)  # (B, G, T)
    return by_scores.to(scores.dtype), cast(by_scale, scale), cast(by_offset, offset), by_values


class SumFunction(torch.autograd.Function):
    """y = [x +] keep (scale sum_s a_s v_s + offset), each value read once in either direction."""

    @staticmethod
    def forward(ctx, path, x, scale, offset, keep, scores, *values):
        """Compute y (B, C, H, W); x is there if there is a scale."""
        ctx.save_for_backward(scale, offset, keep, scores, *values)
        ctx.path = path
        return sum_values(path, x, scores, values, None if scale is None else Affine(scale, offset, keep))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of all tensors but keep."""
        scale, offset, keep, scores, *values = ctx.saved_tensors
        affine, grad = None if scale is None else Affine(scale, offset, keep), like(grad, values[0])
        by_scores, by_scale, by_offset, by_values = sum_gradients(ctx.path, grad, scores, values, affine)
        return None, None if affine is None else grad, by_scale, by_offset, None, by_scores, *by_values


def sum_coefficients(scores: Tensor, affine: Affine | None, channels: int) -> tuple[Tensor, Tensor | None]:
    """Factor of each value, keep scale score (B, C, T), and what is added, keep offset (B or 1, C) or None."""
    weights = wide(scores).repeat_interleave(channels // scores.shape[1], dim=1)
    if affine is None:
        return weights.contiguous(), None
    factors = times(wide(affine.scale), per_sample(affine.keep))
    return (weights * factors.expand(weights.shape[:2]).unsqueeze(-1)).contiguous(), torch.atleast_2d(
        times(wide(affine.offset), per_sample(affine.keep))
    )


class PoolFunction(torch.autograd.Function):
    """Average over the grid, whose gradient is a constant on the grid and takes no memory."""

    @staticmethod
    def forward(ctx, path, x):
        """Average (B, C, H, W) -> (B, C)."""
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return kernels(path).pool(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Spread the gradient over the grid."""
        height, width = ctx.shape[2:]
        return None, (grad / (height * width)).to(ctx.dtype)[:, :, None, None].expand(ctx.shape)


def light(
    path: str, x: Tensor, previous: Tensor | None, weights: LightWeights, *, heads: int, affine: Affine | None
) -> Tensor:
    """Fused MRLA-light by one of the paths, the residual and the affine included if there is one."""
    layout = memory_format(x)
    x = x.contiguous(memory_format=layout)
    scale, offset, keep = affine or (None, None, None)
    return LightFunction.apply(path, heads, x, like(previous, x), *weights, scale, offset, keep)


def weighted_sum(
    path: str, scores: Tensor, values: Sequence[Tensor], *, x: Tensor | None, affine: Affine | None
) -> Tensor:
    """Fused sum of scored values by one of the paths; x is added if there is an affine."""
    layout = memory_format(values[-1])
    last = values[-1].contiguous(memory_format=layout)
    scale, offset, keep = affine or (None, None, None)
    x = like(x, last) if affine is not None else None
    return SumFunction.apply(path, x, scale, offset, keep, scores, *(like(v, last) for v in values[:-1]), last)


def global_average(path: str, x: Tensor) -> Tensor:
    """Average over the grid by one of the paths."""
    return PoolFunction.apply(path, x.contiguous(memory_format=memory_format(x)))
