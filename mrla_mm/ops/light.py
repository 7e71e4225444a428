"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut, or the last layer's o
    y = x + keep norm(o)        with a norm, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the
gradients. A second derivative raises.
"""

import torch
from torch import Tensor

from mrla_mm.ops.autograd import (
    Options,
    dense_format,
    disable_autocast,
    load,
    match_layout,
    refuse_second_derivative,
    save,
)
from mrla_mm.ops.coefficients import Parameters, cat_chunks, sum_chunks, take
from mrla_mm.ops.reference import FrozenNorm, Weights, light_layer


class LightFunction(torch.autograd.Function):
    """Autograd of MRLA-light; the module has the equations."""

    @staticmethod
    def forward(ctx, options, c, shortcut, *parameters):
        """Compute y (B, C, H, W)."""
        parameters = Parameters(*parameters)
        layer = options.layer(parameters)
        passes = options.passes()
        has_gate = layer.weights.query is not None
        added = shortcut if options.add_relu else None
        history = shortcut if options.has_history else None
        x = torch.empty_like(c) if options.add_relu else c
        y = torch.empty_like(c)
        saved = []
        with disable_autocast(c):
            for samples in passes.chunks(c):
                c_chunk, added_chunk, x_chunk = take(samples, c, added, x)
                history_chunk, y_chunk = take(samples, history, y)
                pooled = passes.add_relu(c_chunk, added_chunk, out=x_chunk, pool=has_gate)
                saved_chunk = passes.light_forward(
                    x_chunk, pooled, history_chunk, layer.take(samples), out=y_chunk
                )
                saved.append(saved_chunk)
        save(ctx, cat_chunks(saved), parameters, (x, history))
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and the parameters."""
        refuse_second_derivative()
        saved, parameters, (x, history) = load(ctx)
        layer = ctx.options.layer(parameters)
        passes = ctx.options.passes()
        grad = match_layout(grad, x)
        grad_x = torch.empty_like(x)
        grad_history = None if history is None else torch.empty_like(x)
        gradients = []
        with disable_autocast(x):
            for samples in passes.chunks(x):
                grad_chunk, x_chunk, history_chunk = take(samples, grad, x, history)
                grad_x_chunk, grad_history_chunk = take(samples, grad_x, grad_history)
                gradients_chunk = passes.light_backward(
                    grad_chunk,
                    x_chunk,
                    history_chunk,
                    layer.take(samples),
                    saved.take(samples),
                    grad_x=grad_x_chunk,
                    grad_history=grad_history_chunk,
                )
                gradients.append(gradients_chunk)
        grad_shortcut = grad_history
        if layer.add_relu and history is None:
            grad_shortcut = grad_x
        return None, grad_x, grad_shortcut, *sum_chunks(gradients)


def light_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    *,
    heads: int,
    has_history: bool,
    add_relu: bool = False,
    norm: FrozenNorm | None = None,
) -> Tensor:
    """MRLA-light by a fused path: (B, C, H, W); see the module for the equations.

    The naive path runs where the fused one did not prove itself for such a layer.

    c is x itself or, with add_relu, the block's output before the sum. The shortcut is the history
    and, with add_relu, what is added to c; None where there is neither. With a norm, which stands
    for frozen norm and drop path of the branch, the residual is added.
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if has_history or add_relu else None
    eps = 0.0 if norm is None else norm.eps
    parameters = Parameters.pack(weights, norm)
    options = Options(path, heads, eps, add_relu, has_history=has_history).prove(c, parameters)
    if options.must_not_run():
        how = dict(heads=heads, has_history=has_history, add_relu=add_relu, norm=norm)
        return light_layer(c, shortcut, weights, **how)
    return LightFunction.apply(options, c, shortcut, *parameters)
