"""MRLA-base as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)              with add_relu, else x = c
    o = sum_s softmax_s(q . k_s / sqrt(D)) v_s    Eq. 6, over the stage's layers, the last of whose
    values is dw(x) y = x + keep norm(o)                with a norm, else y = o

Saved for backward are x, the values and small tensors; each value is read once in either direction.
The values pass through the Function, so that the gradient of each comes back as one map, to which
every layer adds in place: what a hook on a value is given may change later. A second derivative
raises.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrla_mm.ops.coefficients import FrozenNorm, State, Weights, cat_chunks, take
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.light import (
    cast_gradients,
    dense_format,
    disable_autocast,
    match_layout,
    refuse_second_derivative,
    sum_partials,
    unpack,
)


class BaseFunction(torch.autograd.Function):
    """Autograd of MRLA-base; the module has the equations.

    Tensors: the four of Weights, the five of FrozenNorm or None, the earlier keys (B, T - 1, E) or
    None, and T - 1 earlier values (B, C, H, W).
    """

    @staticmethod
    def forward(ctx, path, heads, add_relu, eps, c, shortcut, *tensors):
        """Compute y (B, C, H, W), the keys (B, T, E), and the new value; return the earlier values as they are."""
        passes, (weights, norm), (earlier, *values) = (
            passes_of(path),
            unpack(tensors, eps),
            tensors[9:],
        )
        x, y, value = (
            torch.empty_like(c) if add_relu else c,
            torch.empty_like(c),
            torch.empty_like(c),
        )
        states = []
        with disable_autocast(c):
            for samples in passes.chunks(c):
                part, own = take(x, samples), take(value, samples)
                if add_relu:
                    pooled = passes.add_relu(
                        take(c, samples), take(shortcut, samples), out=part, pool=True
                    )
                else:
                    pooled = passes.pool(part)
                passes.apply(part, None, weights.value, State(), residual=False, out=own)
                state = passes.attention_state(
                    part, pooled, weights, take(norm, samples), heads=heads, softmax=True,
                    earlier=take(earlier, samples),
                )  # fmt: skip
                passes.weighted_sum(
                    None if norm is None else part, state, [*(take(v, samples) for v in values), own],
                    out=take(y, samples),
                )  # fmt: skip
                states.append(state)
        state = cat_chunks(states)
        ctx.save_for_backward(x, value, *state, *tensors)
        ctx.set_materialize_grads(False)  # nobody asks for keys and values of a stage's last layer
        ctx.options = path, add_relu, eps
        return y, state.keys, *values, value

    @staticmethod
    def backward(ctx, grad, grad_keys, *grad_values):
        """Compute the gradients of c, the shortcut, the parameters, and the earlier keys and values."""
        refuse_second_derivative()
        path, add_relu, eps = ctx.options
        x, value, *tensors = ctx.saved_tensors
        state, tensors, passes = State(*tensors[:7]), tensors[7:], passes_of(path)
        (weights, norm), values = unpack(tensors, eps), (*tensors[10:], value)
        grad = torch.zeros_like(x) if grad is None else match_layout(grad, x)
        fresh = all(g is None for g in grad_values)
        grad_values = [torch.empty_like(x) if fresh else own_gradient(g, x) for g in grad_values]
        grad_x, partials, grad_earlier = torch.empty_like(x), [], []
        with disable_autocast(x):
            for samples in passes.chunks(x):
                part, known, grad_part = take(x, samples), take(state, samples), take(grad, samples)
                gradients = [take(g, samples) for g in grad_values]
                sums = passes.weighted_sum_backward(
                    grad_part, known, [take(v, samples) for v in values], gradients, fresh=fresh
                )
                taps = passes.grid_sums(gradients[-1], part, None, value=True, shift=False)
                constant, found, of_earlier = passes.attention_backward(
                    part,
                    known,
                    weights,
                    take(norm, samples),
                    taps,
                    sums,
                    take(grad_keys, samples),
                    softmax=True,
                )
                passes.apply_backward(
                    gradients[-1], weights.value, State(shift=constant), residual=False,
                    added=None if norm is None else grad_part, positive=part if add_relu else None,
                    grad_x=take(grad_x, samples),
                )  # fmt: skip
                partials.append(found)
                grad_earlier.append(of_earlier)
        grad_earlier = (
            torch.cat(grad_earlier) if len(grad_earlier) > 1 and values[1:] else grad_earlier[0]
        )
        for gradient in grad_values:
            gradient.is_accumulator = True
        gradients = cast_gradients(sum_partials(partials), tensors[:6])
        grad_shortcut = grad_x if add_relu else None
        return (
            *(None,) * 4, grad_x, grad_shortcut, *gradients, None, None, None, grad_earlier, *grad_values[:-1]
        )  # fmt: skip


def own_gradient(gradient: Tensor | None, x: Tensor) -> Tensor:
    """Gradient of a value that may be added to in place: what a later layer made for that, else a copy."""
    if gradient is None:
        return torch.zeros_like(x)
    found = match_layout(gradient, x)
    return found.clone() if found is gradient and not hasattr(gradient, "is_accumulator") else found


def base_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    earlier: tuple[Tensor | None, Sequence[Tensor]],
    *,
    heads: int,
    add_relu: bool = False,
    norm: FrozenNorm | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """MRLA-base by a fused path; see the module for the equations.

    Args as for `light_fused`, but earlier are keys (B, T - 1, E), None for T = 1, and values (B, C,
    H, W) of the stage's earlier layers.

    Shapes:
        c and shortcut (B, C, H, W) -> y (B, C, H, W), and all layers' keys (B, T, E) and values (B,
        C, H, W).
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if add_relu else None
    *of_norm, eps = norm or (None,) * 6
    keys, values = earlier
    tensors = (*weights, *of_norm, keys, *(match_layout(value, c) for value in values))
    y, keys, *values = BaseFunction.apply(path, heads, add_relu, eps, c, shortcut, *tensors)
    return y, keys, tuple(values)
