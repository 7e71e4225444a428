"""The end of a residual block with its layer attention as one function for autograd: less is kept for backward.

    x = relu(norm(c) + shortcut),    y = x + keep (scale o + offset)
    light   o = gate dw(x) + lambda shortcut
    base    o = sum_s a_s v_s over the stage's layers, the last of whose values is dw(x)

c is the last convolution's output, norm a batch norm with frozen statistics. A plain block keeps c and y; computed step
by step, attention and ReLU keep x too. Here x is computed again in backward, from c and the shortcut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.ops import by_sample
from mrla_mm.ops.frozen_norm import FrozenNorm
from mrla_mm.ops.fused import (
    cast,
    kernels,
    light_values,
    like,
    memory_format,
    small_gradients,
    sum_gradients,
    sum_values,
)
from mrla_mm.ops.gating import Affine, Gate, LightWeights, fold_light
from mrla_mm.ops.reference import base_scores, without_autocast


class LightBlockEnd(torch.autograd.Function):
    """See the module; of the size of a map, c and the shortcut are kept for backward and nothing else."""

    @staticmethod
    def forward(ctx, path, heads, history, eps, c, shortcut, *tensors):
        """Compute y (B, C, H, W); tensors: FrozenNorm without eps, LightWeights, Affine."""
        norm, weights, affine = FrozenNorm(*tensors[:4], eps), LightWeights(*tensors[4:8]), Affine(*tensors[8:])
        with without_autocast(c):
            if path == "folded" and len(c):
                y, gate = by_sample.light_forward(heads, c, shortcut, norm, weights, affine, history=history)
            else:
                x, pooled = kernels(path).activate(c, shortcut, norm, pooled=weights.query is not None)
                y, gate = light_values(path, heads, x, shortcut if history else None, weights, affine, pooled)
        ctx.save_for_backward(c, shortcut, *gate, *tensors)
        ctx.path, ctx.heads, ctx.history, ctx.eps = path, heads, history, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and all tensors but the statistics and keep."""
        c, shortcut, pooled, projected, gate, *tensors = ctx.saved_tensors
        gate = Gate(pooled, projected, gate)
        norm, weights, affine = FrozenNorm(*tensors[:4], ctx.eps), LightWeights(*tensors[4:8]), Affine(*tensors[8:])
        needs_c, _, _, _, *needs_norm = ctx.needs_input_grad[4:10]
        previous, run, needed = shortcut if ctx.history else None, kernels(ctx.path), [needs_c, *needs_norm]
        with without_autocast(c):
            grad = like(grad, c)
            if ctx.path == "folded" and len(c):
                by_c, by_shortcut, by_norm, by_small = by_sample.light_backward(
                    grad, c, shortcut, norm, gate, weights, affine, history=ctx.history, needed=needed
                )
            else:
                x, _ = run.activate(c, shortcut, norm, pooled=False)
                coefficients, constant, by_small = small_gradients(
                    ctx.path, ctx.heads, grad, x, previous, gate, weights, affine, wanted=any(ctx.needs_input_grad[10:])
                )
                by_normed, by_shortcut = run.block_backward(grad, x, coefficients, constant)
                by_c, *by_norm = norm.gradients(by_normed, c, needed)
        return None, None, None, None, by_c, by_shortcut, None, None, *by_norm, *by_small, None


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


class BaseBlockEnd(torch.autograd.Function):
    """See the module; of the size of a map, c, the shortcut and the values are kept for backward and nothing else."""

    @staticmethod
    def forward(ctx, path, heads, eps, c, shortcut, *tensors):
        """Compute y (B, C, H, W), key (B, G, D) and value (B, C, H, W).

        tensors: FrozenNorm without eps; weights of query, key and value; Affine; earlier keys; earlier values.
        """
        norm, (query, key, value), affine = FrozenNorm(*tensors[:4], eps), tensors[4:7], Affine(*tensors[7:10])
        depth = len(tensors[10:]) // 2
        keys, values = tensors[10 : 10 + depth], tensors[10 + depth :]
        with without_autocast(c):
            x, pooled = kernels(path).activate(c, shortcut, norm, pooled=True)
            scores, new_key = base_scores(pooled, query, key, keys, heads)
        new_value, _ = light_values(path, heads, x, None, LightWeights(value=value), None)
        y = sum_values(path, x, scores, (*values, new_value), affine)
        ctx.save_for_backward(c, shortcut, pooled, new_value, *tensors)
        ctx.set_materialize_grads(False)  # nobody asks for key and value of a stage's last layer
        ctx.path, ctx.heads, ctx.eps = path, heads, eps
        return y, new_key, new_value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, by_key, by_value):
        """Compute the gradients of c, the shortcut, and all tensors but the statistics and keep."""
        c, shortcut, pooled, new_value, *tensors = ctx.saved_tensors
        norm, (query, key, value), affine = FrozenNorm(*tensors[:4], ctx.eps), tensors[4:7], Affine(*tensors[7:10])
        depth = len(tensors[10:]) // 2
        keys, values = tensors[10 : 10 + depth], (*tensors[10 + depth :], new_value)
        needs_c, _, _, _, *needs_norm = ctx.needs_input_grad[3:9]
        with without_autocast(c):
            grad = torch.zeros_like(c) if grad is None else like(grad, c)
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in (pooled, query, key, *keys)]
                scores, new_key = base_scores(*leaves[:3], leaves[3:], ctx.heads)
            found = sum_gradients(ctx.path, grad, scores.detach(), values, affine)
            by_scores, by_scale, by_offset, (*by_values, by_own) = found
            by_key = torch.zeros_like(new_key) if by_key is None else by_key
            by_pooled, *by_small = torch.autograd.grad((scores, new_key), leaves, (by_scores, by_key))
            if by_value is not None:
                by_own.add_(by_value)
            x, _ = kernels(ctx.path).activate(c, shortcut, norm, pooled=False)
            by_sum, by_weight = value_gradients(ctx.path, by_own, x, value, by_pooled)
            by_sum.add_(grad)
            torch.ops.aten.threshold_backward.grad_input(by_sum, x, 0, grad_input=by_sum)  # through ReLU, in place
            by_c, *by_norm = norm.gradients(by_sum, c, [needs_c, *needs_norm])
        by_branch = (*by_small[:2], by_weight, by_scale, by_offset, None)
        return None, None, None, by_c, by_sum, None, None, *by_norm, *by_branch, *by_small[2:], *by_values


def value_gradients(path: str, grad: Tensor, x: Tensor, weight: Tensor, by_pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, that of its pooled channels (B, C) included, and of the weight of the value dw(x)."""
    coefficients = fold_light(x, None, LightWeights(value=weight), None, history=False)
    sums = kernels(path).light_sums(grad, x, None, coefficients.taps.shape[-1], shift=False)
    constant = by_pooled / (x.shape[2] * x.shape[3])
    by_x, _ = kernels(path).light_backward(grad, coefficients, constant, residual=False, history=False)
    return by_x, cast(sums.taps.sum(0).view_as(weight), weight)


def base_block_end(
    path: str,
    c: Tensor,
    shortcut: Tensor,
    norm: FrozenNorm,
    weights: Sequence[Tensor],
    earlier: tuple[Sequence[Tensor], Sequence[Tensor]],
    affine: Affine,
    *,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused end of a block by one of the paths; weights of query, key and value, earlier keys and values."""
    c = c.contiguous(memory_format=memory_format(c))
    keys, values = earlier
    *norm, eps = norm
    tensors = (*norm, *weights, *affine, *keys, *(like(value, c) for value in values))
    return BaseBlockEnd.apply(path, heads, eps, c, like(shortcut, c), *tensors)
