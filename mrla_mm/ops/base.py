"""MRLA-base and MLA as an autograd Function, with or without sum, ReLU, norm, residual around it.

    x = relu(c + shortcut)                       with add_relu, else x = c
    o = sum_s softmax_s(q . k_s / sqrt(D)) v_s   Eq. 6, over the stage's layers; the last v is dw(x)
    y = x + keep norm(o)                         with a norm, else y = o

With project_last, as in MLA, the values are the maps x_s, and o = dw(sum_s a_s x_s); the norm's
scale and keep are part of that sum.

Saved for backward are x, the values and small tensors; of MLA, whose last value is x, one map less.
The values pass through the Function, so that the gradient of each comes back as one map, to which
every layer adds in place: what a hook on a value is given, or retain_grad keeps, may change later.
A second derivative raises.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from mrla_mm.ops.coefficients import Parameters, State, cat, cat_chunks, sum_chunks, take
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.light import (
    Options,
    dense_format,
    disable_autocast,
    load_saved,
    match_layout,
    refuse_second_derivative,
)
from mrla_mm.ops.reference import FrozenNorm, Weights


class BaseFunction(torch.autograd.Function):
    """Autograd of MRLA-base and MLA; the module has the equations.

    After the parameters come the earlier keys (B, T - 1, E) or None, and T - 1 earlier values
    (B, C, H, W). `inner` is what lies between convolution and sum: the own value, of MLA the sum.
    """

    @staticmethod
    def forward(ctx, options, c, shortcut, *tensors):
        """Compute y (B, C, H, W), keys (B, T, E) or, of MLA, averages (B, C), and T values."""
        tensors = iter(tensors)
        parameters = Parameters(*islice(tensors, len(Parameters._fields)))
        earlier_keys = next(tensors)
        layer = options.layer(parameters)
        passes = passes_of(options.path)
        x = torch.empty_like(c) if options.add_relu else c
        inner = torch.empty_like(c)
        values = (*tensors, x if options.project_last else inner)
        y = torch.empty_like(c)
        states = []
        with disable_autocast(c):
            for samples in passes.chunks(c):
                c_chunk, x_chunk, shortcut_chunk, y_chunk = take(samples, c, x, shortcut, y)
                keys_chunk, inner_chunk = take(samples, earlier_keys, inner)
                values_chunk = take(samples, *values)
                pooled = passes.add_relu(c_chunk, shortcut_chunk, out=x_chunk, pool=True)
                state = passes.base_state(pooled, layer.take(samples), keys_chunk)
                residual = None if layer.norm is None else x_chunk
                convolve = partial(passes.apply, weight=layer.weights.value, residual=False)
                if options.project_last:
                    factors, shift = state._replace(shift=None), State(shift=state.shift)
                    passes.weighted_sum(None, factors, values_chunk, out=inner_chunk)
                    convolve(inner_chunk, residual, state=shift, out=y_chunk)
                else:
                    convolve(x_chunk, None, state=State(), out=inner_chunk)
                    passes.weighted_sum(residual, state, values_chunk, out=y_chunk)
                states.append(state)
        state = cat_chunks(states)
        ctx.save_for_backward(*state, *parameters, x, *values)
        ctx.set_materialize_grads(False)  # nobody asks for keys and values of a stage's last layer
        ctx.options = options
        return y, state.pooled if options.project_last else state.keys, *values

    @staticmethod
    def backward(ctx, grad, grad_left, *grad_values):
        """Compute the gradients of c, shortcut, parameters, and earlier keys and values."""
        refuse_second_derivative()
        options = ctx.options
        state, parameters, (x, *values) = load_saved(ctx)
        layer = options.layer(parameters)
        passes = passes_of(options.path)
        has_norm = layer.norm is not None
        grad = torch.zeros_like(x) if grad is None else match_layout(grad, x)
        fresh = all(grad_value is None for grad_value in grad_values)
        if fresh:
            grad_values = [torch.empty_like(x) for _ in values]
        else:
            grad_values = [own_gradient(grad_value, x, ctx) for grad_value in grad_values]
        grad_x = torch.empty_like(x)
        gradients = []
        grad_earlier_keys = []
        with disable_autocast(x):
            for samples in passes.chunks(x):
                grad_chunk, x_chunk, grad_x_chunk = take(samples, grad, x, grad_x)
                (grad_left_chunk,) = take(samples, grad_left)
                grad_values_chunk = take(samples, *grad_values)
                state_chunk = State(*take(samples, *state))
                values_chunk = take(samples, *values)
                sum_backward = partial(passes.weighted_sum_backward, fresh=fresh)
                grad_own = grad_values_chunk[-1]
                kernel, grad_keys = layer.weights.value, grad_left_chunk
                if options.project_last:
                    factors = state_chunk._replace(shift=None)
                    inner = grad_x_chunk  # the sum once more, then its gradient
                    passes.weighted_sum(None, factors, values_chunk, out=inner)
                    sums = passes.grid_sums(grad_chunk, inner, None, value=True, shift=has_norm)
                    passes.apply_backward(grad_chunk, kernel, State(), residual=False, grad_x=inner)
                    value_sums = sum_backward(inner, factors, values_chunk, grad_values_chunk)
                    if has_norm:
                        passes.take_shift(value_sums, sums)
                    kernel = grad_keys = None
                else:
                    value_sums = sum_backward(
                        grad_chunk, state_chunk, values_chunk, grad_values_chunk
                    )
                    sums = passes.grid_sums(grad_own, x_chunk, None, value=True, shift=False)
                grad_pixel, of_parameters, of_keys = passes.base_backward(
                    x_chunk, state_chunk, layer.take(samples), sums, value_sums, grad_keys
                )
                if options.project_last and grad_left is not None:
                    grad_pixel = grad_pixel + grad_left_chunk / (x.shape[2] * x.shape[3])
                passes.apply_backward(
                    grad_own,
                    kernel,
                    State(shift=grad_pixel),
                    residual=False,
                    added=grad_chunk if has_norm else None,
                    positive=x_chunk if options.add_relu else None,
                    grad_x=grad_x_chunk,
                )
                gradients.append(of_parameters)
                grad_earlier_keys.append(of_keys)
        # The earlier layer's backward adds to these in place, and nobody else may.
        earlier = grad_values[:-1]
        nodes = ctx.next_functions[len(ctx.next_functions) - len(earlier) :]
        for grad_value, (node, _) in zip(earlier, nodes, strict=True):
            grad_value.receiver = node
        return (
            None,
            grad_x,
            grad_x if options.add_relu else None,
            *sum_chunks(gradients),
            cat(grad_earlier_keys),
            *earlier,
        )


def own_gradient(gradient: Tensor | None, x: Tensor, node: object) -> Tensor:
    """Gradient of a value that may be added to: one made for this node, or a copy."""
    if gradient is None:
        return torch.zeros_like(x)
    matched = match_layout(gradient, x)
    is_ours = matched is not gradient or getattr(gradient, "receiver", None) is node
    return matched if is_ours else matched.clone()


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
    project_last: bool = False,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """MRLA-base or, with project_last, MLA by a fused path; see the module for the equations.

    Args as for `light_fused`, but earlier are keys (B, T - 1, E), None for T = 1, and values (B, C,
    H, W) of the stage's earlier layers; of MLA those keys are by this layer's f_K.

    Shapes: c and shortcut (B, C, H, W) -> y (B, C, H, W), and all layers' keys (B, T, E) and values
    (B, C, H, W); of MLA the average of x (B, C) in place of the keys.
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if add_relu else None
    earlier_keys, earlier_values = earlier
    values = [match_layout(value, c) for value in earlier_values]
    eps = 0.0 if norm is None else norm.eps
    options = Options(path, heads, False, add_relu, eps, project_last)
    parameters = Parameters.pack(weights, norm)
    y, left, *values = BaseFunction.apply(options, c, shortcut, *parameters, earlier_keys, *values)
    return y, left, tuple(values)
