"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut, or the last layer's o
    y = x + keep norm(o)        with a norm, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the
gradients. A batch norm in training needs o in its backward pass, which computes it again. A second
derivative raises.
"""

from functools import partial

import torch
from torch import Tensor

from mrla_mm.ops import autograd
from mrla_mm.ops.coefficients import Layer, Parameters, Saved
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.reference import BatchNorm, Weights, light_layer


class LightFunction(torch.autograd.Function):
    """Autograd of MRLA-light; the module has the equations."""

    @staticmethod
    def forward(ctx, options, c, shortcut, *parameters):
        """Compute y (B, C, H, W)."""
        parameters = Parameters(*parameters)
        layer = options.layer(parameters)
        passes = options.passes()
        has_gate = layer.weights.query is not None
        summand = shortcut if layer.add_relu else None
        history = shortcut if layer.has_history else None
        x = torch.empty_like(c) if layer.add_relu else c
        y = torch.empty_like(c)
        with autograd.DisableAutocast():
            averages = passes.add_relu(c, summand, out=x, pool=has_gate)
            saved = passes.light_coefficients(averages, layer, x.shape)
            write_output(passes, layer, saved, x, history, out=y)
            norm = options.training_norm
            y, *statistics = autograd.batch_norm_residual(y, norm, residual=x)
        autograd.save_for_backward(ctx, options, parameters, saved, (x, history, *statistics))
        return y

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and the parameters."""
        autograd.refuse_second_derivative()
        layer, saved, (x, history, *statistics) = autograd.load_saved(ctx)
        passes = ctx.options.passes()
        norm = ctx.options.training_norm
        grad = autograd.match_layout(grad, x)
        recompute = partial(write_output, passes, layer, saved, x, history)
        with autograd.DisableAutocast():
            grad_out, norm_grads = autograd.batch_norm_backward(
                grad, x, norm, statistics, recompute
            )
            grad_x, grad_history, gradients = layer_backward(
                passes, layer, saved, x, history, grad_out
            )
            if norm is not None:  # and so no ReLU before x
                grad_x.add_(grad)  # the residual's; behind a frozen norm the passes add it
                gradients = gradients._replace(**norm_grads)
        grad_shortcut = grad_history
        if layer.add_relu and history is None:
            grad_shortcut = grad_x
        return None, grad_x, grad_shortcut, *gradients


def write_output(
    passes: Passes, layer: Layer, saved: Saved, x: Tensor, history: Tensor | None, *, out: Tensor
) -> None:
    """Write y, or o before a batch norm in training."""
    passes.convolve(
        x, layer.weights.value, gain=saved.gain, slope=saved.slope, offset=saved.offset,
        history=history, residual=layer.fuses_norm, out=out,
    )  # fmt: skip


def layer_backward(
    passes: Passes, layer: Layer, saved: Saved, x: Tensor, history: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None, Parameters]:
    """Gradients of x and the history, with add_relu of c and the shortcut; and of the parameters.

    grad is that of what `write_output` wrote.
    """
    weight = layer.weights.value
    options = dict(convolved=weight is not None, sum_grad=layer.fuses_norm)
    sums = passes.grid_sums(grad, x, history=history, **options)
    grad_pixel, gradients = passes.light_coefficients_backward(saved, layer, x.shape, sums)
    grad_x = torch.empty_like(x)
    grad_history = None if history is None else torch.empty_like(x)
    passes.convolve_backward(
        grad,
        weight,
        gain=saved.gain,
        slope=saved.slope,
        grad_pixel=grad_pixel,
        residual=layer.fuses_norm,
        relu_output=x if layer.add_relu else None,
        grad_x=grad_x,
        grad_history=grad_history,
    )
    return grad_x, grad_history, gradients


def light_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    *,
    heads: int,
    has_history: bool,
    add_relu: bool = False,
    norm: BatchNorm | None = None,
) -> Tensor:
    """MRLA-light by a fused path: (B, C, H, W); see the module for the equations.

    The naive path runs where the fused one did not prove itself for such a layer.

    c is x itself or, with add_relu, the block's output before the sum. The shortcut is the history
    and, with add_relu, what is added to c; None where there is neither. With a norm, which stands
    for norm and drop path of the branch, the residual is added. A batch norm in training comes
    without add_relu.
    """
    c = c.contiguous(memory_format=autograd.dense_format(c))
    shortcut = autograd.match_layout(shortcut, c) if has_history or add_relu else None
    parameters = Parameters.pack(weights, norm)
    settings = dict(heads=heads, has_history=has_history, add_relu=add_relu)
    options = autograd.Options.after_self_check(path, c, parameters, norm, **settings)
    if options.has_failed():
        return light_layer(c, shortcut, weights, **settings, norm=norm)
    return LightFunction.apply(options, c, shortcut, *parameters)
