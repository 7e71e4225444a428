"""The end of a residual block with its layer attention as one function for autograd: less is kept for backward.

    x = relu(c + shortcut),    y = x + keep (scale o + offset)
    light   o = gate dw(x) + lambda shortcut
    base    o = sum_s a_s v_s over the stage's layers, the last of whose values is dw(x)

c is what the block's last norm puts out. Sum and ReLU go through memory together with the attention, forward and back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.ops import by_sample
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
    """See the module; of the size of a map, x and, as the history, the shortcut are kept for backward."""

    @staticmethod
    def forward(ctx, path, heads, history, c, shortcut, *tensors):
        """Compute y (B, C, H, W); tensors: LightWeights, Affine."""
        weights, affine, previous = LightWeights(*tensors[:4]), Affine(*tensors[4:]), shortcut if history else None
        with without_autocast(c):
            if path == "folded" and len(c):
                x, y, gate = by_sample.light_forward(heads, c, shortcut, weights, affine, history=history)
            else:
                x, pooled = kernels(path).activate(c, shortcut, pooled=weights.query is not None)
                y, gate = light_values(path, heads, x, previous, weights, affine, pooled)
        ctx.save_for_backward(x, previous, *gate, *tensors)
        ctx.path, ctx.heads = path, heads
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and all tensors but keep."""
        x, previous, pooled, projected, gate, *tensors = ctx.saved_tensors
        gate, weights, affine = Gate(pooled, projected, gate), LightWeights(*tensors[:4]), Affine(*tensors[4:])
        with without_autocast(x):
            grad = like(grad, x)
            if ctx.path == "folded" and len(x):
                by_c, by_shortcut, by_small = by_sample.light_backward(grad, x, previous, gate, weights, affine)
            else:
                coefficients, constant, by_small = small_gradients(
                    ctx.path, ctx.heads, grad, x, previous, gate, weights, affine, wanted=any(ctx.needs_input_grad[5:])
                )
                by_c, by_shortcut = kernels(ctx.path).block_backward(grad, x, coefficients, constant)
        return None, None, None, by_c, by_shortcut, *by_small, None


def light_block_end(
    path: str, c: Tensor, shortcut: Tensor, weights: LightWeights, affine: Affine, *, heads: int, history: bool
) -> Tensor:
    """Fused end of a block by one of the paths."""
    c = c.contiguous(memory_format=memory_format(c))
    return LightBlockEnd.apply(path, heads, history, c, like(shortcut, c), *weights, *affine)


class BaseBlockEnd(torch.autograd.Function):
    """See the module; of the size of a map, x and the values are kept for backward and nothing else."""

    @staticmethod
    def forward(ctx, path, heads, c, shortcut, *tensors):
        """Compute y (B, C, H, W), key (B, G, D) and value (B, C, H, W).

        tensors: weights of query, key and value; Affine; earlier keys; earlier values.
        """
        (query, key, value), affine, (keys, values) = tensors[:3], Affine(*tensors[3:6]), halves(tensors[6:])
        with without_autocast(c):
            x, pooled = kernels(path).activate(c, shortcut, pooled=True)
            scores, new_key = base_scores(pooled, query, key, keys, heads)
        new_value, _ = light_values(path, heads, x, None, LightWeights(value=value), None)
        y = sum_values(path, x, scores, (*values, new_value), affine)
        ctx.save_for_backward(x, pooled, new_value, *tensors)
        ctx.set_materialize_grads(False)  # nobody asks for key and value of a stage's last layer
        ctx.path, ctx.heads = path, heads
        return y, new_key, new_value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, by_key, by_value):
        """Compute the gradients of c, the shortcut, and all tensors but keep."""
        x, pooled, new_value, *tensors = ctx.saved_tensors
        (query, key, value), affine, (keys, values) = tensors[:3], Affine(*tensors[3:6]), halves(tensors[6:])
        with without_autocast(x):
            grad = torch.zeros_like(x) if grad is None else like(grad, x)
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in (pooled, query, key, *keys)]
                scores, new_key = base_scores(*leaves[:3], leaves[3:], ctx.heads)
            found = sum_gradients(ctx.path, grad, scores.detach(), (*values, new_value), affine)
            by_scores, by_scale, by_offset, (*by_values, by_own) = found
            by_key = torch.zeros_like(new_key) if by_key is None else by_key
            by_pooled, *by_small = torch.autograd.grad((scores, new_key), leaves, (by_scores, by_key))
            if by_value is not None:
                by_own.add_(by_value)
            by_sum, by_weight = value_gradients(ctx.path, by_own, x, value, by_pooled)
            by_sum.add_(grad)
            torch.ops.aten.threshold_backward.grad_input(by_sum, x, 0, grad_input=by_sum)  # through ReLU, in place
        by_branch = (*by_small[:2], by_weight, by_scale, by_offset, None)
        return None, None, by_sum, by_sum, *by_branch, *by_small[2:], *by_values


def halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Keys and values of the earlier layers, of which there are as many."""
    depth = len(tensors) // 2
    return tensors[:depth], tensors[depth:]


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
    weights: Sequence[Tensor],
    earlier: tuple[Sequence[Tensor], Sequence[Tensor]],
    affine: Affine,
    *,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused end of a block by one of the paths; weights of query, key and value, earlier keys and values."""
    c = c.contiguous(memory_format=memory_format(c))
    keys, values = earlier
    tensors = (*weights, *affine, *keys, *(like(value, c) for value in values))
    return BaseBlockEnd.apply(path, heads, c, like(shortcut, c), *tensors)
