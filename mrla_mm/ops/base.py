"""MRLA-base and MLA as an autograd Function, with or without sum, ReLU, norm, residual around it.

    x = relu(c + shortcut)                       with add_relu, else x = c
    o = sum_s softmax_s(q . k_s / sqrt(D)) v_s   Eq. 6, over the stage's layers; the last v is dw(x)
    y = x + keep norm(o)                         with a norm, else y = o

Of MLA the values are the maps x_s, and the convolution comes after the sum, o = dw(sum_s a_s x_s).

Saved for backward are x, the values and small tensors; of MLA, whose last value is x, one map less.
A batch norm in training needs o in its backward pass, which computes it again. A second derivative
raises.

A layer returns the earlier values too, and the next one takes them from there: so the gradient of
each comes back as one map, to which layer after layer adds in place (see `label_receivers`). Hooks
of a value and torch.autograd.grad get that very map, which is complete once the backward pass has
gone through the layer that computed the value: if asked for values alone, torch.autograd.grad ends
before that. retain_grad copies the map before the layer that returned the tensor adds to it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mrla_mm.ops import autograd
from mrla_mm.ops.coefficients import Parameters
from mrla_mm.ops.reference import BatchNorm, Weights, base_layer, mla_layer


class BaseFunction(torch.autograd.Function):
    """Autograd of MRLA-base and MLA; the module has the equations.

    After the parameters come the earlier keys (B, T - 1, C) or None, and T - 1 earlier values
    (B, C, H, W).
    """

    @staticmethod
    def forward(ctx, options, c, shortcut, *tensors):
        """Compute y (B, C, H, W), keys (B, T, C) or, of MLA, averages (B, C), and T values."""
        count = len(Parameters._fields)
        parameters = Parameters(*tensors[:count])
        earlier_keys, *earlier_values = tensors[count:]
        layer = options.layer(parameters)
        passes = options.passes()
        forward = passes.mla_forward if options.is_mla else passes.base_forward
        x = torch.empty_like(c) if options.add_relu else c
        own_value = x if options.is_mla else torch.empty_like(c)
        values = (*earlier_values, own_value)
        y = torch.empty_like(c)
        with autograd.disable_autocast(c):
            pooled = passes.add_relu(c, shortcut, out=x, pool=True)
            saved = forward(x, pooled, values, layer, earlier_keys=earlier_keys, out=y)
            y, *statistics = autograd.add_batch_norm(x, y, parameters, options.batch_norm)
        autograd.save(ctx, saved, parameters, (x, *statistics, *values))
        ctx.set_materialize_grads(False)  # nobody asks for keys and values of a stage's last layer
        ctx.options = options
        keys_or_averages = saved.attention.pooled if options.is_mla else saved.attention.keys
        return y, keys_or_averages, *values

    @staticmethod
    def backward(ctx, grad, grad_keys_or_averages, *grad_values):
        """Compute the gradients of c, shortcut, parameters, and earlier keys and values."""
        autograd.refuse_second_derivative()
        options = ctx.options
        saved, parameters, (x, mean, inverse_deviation, *values) = autograd.load(ctx)
        layer = options.layer(parameters)
        passes = options.passes()
        norm = options.batch_norm
        output = passes.mla_output if options.is_mla else passes.base_output
        backward = passes.mla_backward if options.is_mla else passes.base_backward
        grad = torch.zeros_like(x) if grad is None else autograd.match_layout(grad, x)
        grad_out = grad
        overwrite = all(grad_value is None for grad_value in grad_values)
        if overwrite:
            grad_values = [torch.empty_like(x) for _ in values]
        else:
            grad_values = [
                autograd.writable_gradient(grad_value, x, ctx) for grad_value in grad_values
            ]
        grad_x = torch.empty_like(x)
        targets = dict(grad_values=grad_values, overwrite=overwrite, grad_x=grad_x)
        with autograd.disable_autocast(x):
            if norm:
                out = torch.empty_like(x)
                output(x, values, layer, saved, out=out)
                statistics = mean, inverse_deviation
                grad_out, *of_norm = autograd.batch_norm_backward(
                    grad, out, parameters, norm, statistics
                )
            gradients, grad_earlier_keys = backward(
                grad_out, grad_keys_or_averages, x, values, layer, saved, **targets
            )
            if norm:
                grad_x.add_(grad)  # of the residual, which the passes add for a frozen norm alone
                gradients = gradients._replace(norm_weight=of_norm[0], norm_bias=of_norm[1])
        grad_earlier_values = grad_values[:-1]
        autograd.label_receivers(grad_earlier_values, ctx)
        return (
            None,
            grad_x,
            grad_x if layer.add_relu else None,
            *gradients,
            grad_earlier_keys,
            *grad_earlier_values,
        )


def base_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    earlier: tuple[Tensor | None, Sequence[Tensor]],
    *,
    heads: int,
    add_relu: bool = False,
    norm: BatchNorm | None = None,
    is_mla: bool = False,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """MRLA-base by a fused path; see the module for the equations.

    Args as for `light_fused`, but earlier are the keys (B, T - 1, C), None for T = 1, and values
    (B, C, H, W) of the stage's earlier layers; of MLA those keys are by this layer's f_K.

    Shapes: c and shortcut (B, C, H, W) -> y (B, C, H, W), and all layers' keys (B, T, C) and values
    (B, C, H, W); of MLA the average of x (B, C) in place of the keys.
    """
    c = c.contiguous(memory_format=autograd.dense_format(c))
    shortcut = autograd.match_layout(shortcut, c) if add_relu else None
    earlier_keys, earlier_values = earlier
    values = [autograd.match_layout(value, c) for value in earlier_values]
    parameters = Parameters.pack(weights, norm)
    eps = 0.0 if norm is None else norm.eps
    batch_norm = norm if norm and norm.momentum is not None else None
    options = autograd.Options(path, heads, eps, add_relu, is_mla=is_mla, batch_norm=batch_norm)
    options = options.prove(c, parameters, depth=len(values) + 1)
    if options.has_failed():
        layer = mla_layer if is_mla else base_layer
        how = dict(heads=heads, add_relu=add_relu, norm=norm)
        return layer(c, shortcut, weights, (earlier_keys, values), **how)
    y, keys_or_averages, *values = BaseFunction.apply(
        options, c, shortcut, *parameters, earlier_keys, *values
    )
    return y, keys_or_averages, tuple(values)


mla_fused = partial(base_fused, is_mla=True)
