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
    Coefficients,
    Gate,
    LightWeights,
    MapSums,
    fold_light,
    light_gain,
    per_sample,
    pooled_gate,
    times,
    unfold_light,
    wide,
)
from mrla_mm.ops.reference import without_autocast


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


def gate_kernels(path: str, weights: LightWeights) -> ModuleType | None:
    """Module with kernels for what surrounds the maps of light attention; None where plain PyTorch computes it."""
    if path == "triton" and not torch.compiler.is_compiling():
        from mrla_mm.ops import triton_gate

        return triton_gate if triton_gate.takes(weights) else None
    return None


def fold(
    path: str, x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, *, heads: int, history: bool
) -> tuple[Gate, Coefficients]:
    """Gate of its pooled channels, unless it is known, and the linear function of the maps."""
    fast = gate_kernels(path, weights)
    if fast is not None:
        return fast.fold(x, gate.pooled, weights, affine, heads=heads, history=history)
    if gate.pooled is not None and gate.gate is None:
        gate = pooled_gate(gate.pooled, weights, heads)
    gain = light_gain(gate.gate, affine, x.shape[1])
    return gate, fold_light(x, gain, weights, affine, history=history)


def unfold(
    path: str, x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, sums: MapSums
) -> tuple[Tensor | None, LightWeights, Tensor | None, Tensor | None]:
    """Gradients that follow from the sums over the grid, see `gating.unfold_light`."""
    fast = gate_kernels(path, weights)
    if fast is not None:
        return fast.unfold(x, gate, weights, affine, sums)
    return unfold_light(x, gate, light_gain(gate.gate, affine, x.shape[1]), weights, affine, sums)


def light_values(
    path: str,
    heads: int,
    x: Tensor,
    previous: Tensor | None,
    weights: LightWeights,
    affine: Affine | None,
    pooled: Tensor | None = None,
) -> tuple[Tensor, Gate]:
    """Light attention of x (B, C, H, W), and its gate; pooled (B, C) if it is known already."""
    with without_autocast(x):
        gate = Gate() if weights.query is None else Gate(kernels(path).pool(x) if pooled is None else pooled)
        history = previous is not None
        gate, coefficients = fold(path, x, gate, weights, affine, heads=heads, history=history)
        out = kernels(path).light_forward(x, previous, coefficients, residual=affine is not None)
    return out, gate


def small_gradients(
    path: str,
    heads: int,
    grad: Tensor,
    x: Tensor,
    previous: Tensor | None,
    gate: Gate,
    weights: LightWeights,
    affine: Affine | None,
    *,
    wanted: bool,
) -> tuple[Coefficients, Tensor | None, list[Tensor | None]]:
    """What backward of `light_values` needs before it writes maps, and gradients of what is small, if wanted.

    Returns:
        The linear function of the maps, what the gate adds to every position of the gradient of x (B, C), and the
        gradients of weights, scale and offset; None for what is absent.
    """
    constant, found = None, (LightWeights(), None, None)
    gate, coefficients = fold(path, x, gate, weights, affine, heads=heads, history=previous is not None)
    if wanted or gate.gate is not None:
        sums = kernels(path).light_sums(grad, x, previous, coefficients.taps.shape[-1], shift=affine is not None)
        constant, *found = unfold(path, x, gate, weights, affine, sums)
    return coefficients, constant, in_precision(found, weights, affine)


def in_precision(
    found: tuple[LightWeights, Tensor | None, Tensor | None], weights: LightWeights, affine: Affine | None
) -> list[Tensor | None]:
    """Gradients of the weights, scale and offset in the precision of each."""
    by_weights, *by_affine = found
    scale, offset, _ = affine or (None, None, None)
    pairs = zip([*by_weights, *by_affine], [*weights, scale, offset], strict=True)
    return [cast(gradient, tensor) for gradient, tensor in pairs]


class LightFunction(torch.autograd.Function):
    """y = [x +] keep (scale (gate dw(x) + lambda p) + offset); see `gating` for the derivation."""

    @staticmethod
    def forward(ctx, path, heads, x, previous, query, key, value, history_scale, scale, offset, keep):
        """Compute y (B, C, H, W); the residual is added if there is a scale."""
        weights = LightWeights(query, key, value, history_scale)
        affine = None if scale is None else Affine(scale, offset, keep)
        out, gate = light_values(path, heads, x, previous, weights, affine)
        ctx.save_for_backward(x, previous, query, key, value, history_scale, scale, offset, keep, *gate)
        ctx.path, ctx.heads = path, heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of all tensors but keep."""
        x, previous, *weights, scale, offset, keep, pooled, projected, gate = ctx.saved_tensors
        affine = None if scale is None else Affine(scale, offset, keep)
        gate, grad, (*_, history) = Gate(pooled, projected, gate), like(grad, x), ctx.needs_input_grad[:4]
        with without_autocast(x):
            coefficients, constant, by_small = small_gradients(
                ctx.path, ctx.heads, grad, x, previous, gate, LightWeights(*weights), affine,
                wanted=any(ctx.needs_input_grad[4:10]),
            )  # fmt: skip
            by_x, by_previous = kernels(ctx.path).light_backward(
                grad, coefficients, constant, residual=affine is not None, history=history
            )
        return None, None, by_x, by_previous, *by_small, None


def sum_values(path: str, x: Tensor | None, scores: Tensor, values: Sequence[Tensor], affine: Affine | None) -> Tensor:
    """Sum of scored values (B, C, H, W); x is added if there is an affine."""
    with without_autocast(values[0]):
        weights, shift = sum_coefficients(scores, affine, values[0].shape[1])
        return kernels(path).sum_forward(x, weights, shift, values)


def sum_gradients(
    path: str, grad: Tensor, scores: Tensor, values: Sequence[Tensor], affine: Affine | None
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Gradients of `sum_values`: of the scores, of scale and offset, and of each value; that of x is grad itself."""
    channels, run = values[0].shape[1], kernels(path)
    scale, offset, keep = affine or (None, None, None)
    with without_autocast(grad):
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
    def forward(ctx, path, *tensors):
        """Compute y (B, C, H, W); tensors: x, scale, offset, keep, scores, values. x is there if there is a scale."""
        x, scale, offset, keep, scores, *values = tensors  # Dynamo drops ctx where it counts as many names as arguments
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
