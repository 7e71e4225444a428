"""MRLA-base and MLA as one autograd Function; sum and ReLU before it, norm and residual after it.

    x = relu(c + shortcut)                       with add_relu, else x = c
    o = sum_s softmax_s(q . k_s / sqrt(D)) v_s   Eq. 6, over the stage's layers; the last v is dw(x)
    y = x + keep norm(o)                         with a norm, else y = o

Of MLA the values are the maps x_s, and the convolution comes after the sum, o = dw(sum_s a_s x_s).

Backward saves x, the T values and small tensors. MLA saves T maps only: its last value is x. A
batch norm in training needs o in its backward pass, which computes it again. A second derivative
raises.

Each layer returns the earlier values as outputs, and the next layer takes them from there. So each
value's gradient is one map, to which the layers add in place (see `label_receivers`). A tensor hook
on a value, and torch.autograd.grad of one, get that map before the value's own layer adds to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mrla_mm.ops import autograd
from mrla_mm.ops.coefficients import Layer, Parameters, PixelGrad, Saved
from mrla_mm.ops.passes import Passes
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
        is_mla = layer.is_mla
        passes = options.passes()
        x = torch.empty_like(c) if layer.add_relu else c
        own_value = x if is_mla else torch.empty_like(c)
        values = (*earlier_values, own_value)
        y = torch.empty_like(c)
        with autograd.DisableAutocast():
            averages = passes.add_relu(c, shortcut, out=x, pool=True)
            if not is_mla:
                passes.convolve(x, layer.weights.value, out=own_value)
            saved = passes.base_coefficients(averages, layer, earlier_keys)
            steps_class = MLASteps if is_mla else BaseSteps
            steps_class(passes, layer, saved, x, values).write_output(out=y)
            norm = options.training_norm
            y, *statistics = autograd.batch_norm_residual(y, norm, residual=x)
        autograd.save_for_backward(ctx, options, parameters, saved, (x, *statistics, *values))
        ctx.set_materialize_grads(False)  # unused outputs arrive as None, not as maps of zeros
        keys_or_pooled = saved.pooled if is_mla else saved.keys
        return y, keys_or_pooled, *values

    @staticmethod
    def backward(ctx, grad, grad_keys_or_pooled, *grad_values):
        """Compute the gradients of c, shortcut, parameters, and earlier keys and values."""
        autograd.refuse_second_derivative()
        layer, saved, (x, mean, inverse_deviation, *values) = autograd.load_saved(ctx)
        norm = ctx.options.training_norm
        steps_class = MLASteps if layer.is_mla else BaseSteps
        steps = steps_class(ctx.options.passes(), layer, saved, x, values)
        grad = torch.zeros_like(x) if grad is None else autograd.match_layout(grad, x)
        grad_values = [autograd.writable_gradient(each, x, ctx) for each in grad_values]
        with autograd.DisableAutocast():
            grad_out, norm_grads = autograd.batch_norm_backward(
                grad, x, norm, (mean, inverse_deviation), steps.write_output
            )
            grad_x, gradients, grad_earlier_keys = steps.backward(
                grad_out, grad_keys_or_pooled, grad_values
            )
            if norm is not None:  # and so no ReLU before x
                grad_x.add_(grad)  # the residual's; behind a frozen norm the passes add it
                gradients = gradients._replace(**norm_grads)
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


@dataclass
class BaseSteps:
    """MRLA-base between the pooling and the norm in training; x and T values (B, C, H, W)."""

    passes: Passes
    layer: Layer
    saved: Saved
    x: Tensor
    values: Sequence[Tensor]

    def write_output(self, *, out: Tensor) -> None:
        """Write y, or o before a batch norm in training."""
        self.passes.weighted_sum(
            self.values,
            self.saved.scores,
            gain=self.saved.gain,
            offset=self.saved.offset,
            x=self.x if self.layer.fuses_norm else None,
            out=out,
        )

    def backward(
        self, grad: Tensor, grad_keys: Tensor | None, grad_values: Sequence[Tensor]
    ) -> tuple[Tensor, Parameters, Tensor | None]:
        """Add to grad_values, given the gradient of what `write_output` wrote.

        Returned are the gradients of x (with add_relu of c and shortcut), parameters, earlier keys.
        """
        passes, layer, saved, x = self.passes, self.layer, self.saved, self.x
        value_sums = passes.weighted_sum_backward(
            grad,
            self.values,
            saved.scores,
            gain=saved.gain,
            grad_values=grad_values,
            sum_grad=layer.fuses_norm,
        )
        grad_own_value = grad_values[-1]  # with what the weighted sum has just added
        sums = passes.grid_sums(grad_own_value, x, convolved=True, sum_grad=False)
        grad_pixel, gradients, grad_earlier_keys = passes.base_coefficients_backward(
            saved, layer, x.shape, sums, value_sums, grad_keys=grad_keys
        )
        grad_x = self.backward_of_x(grad, grad_own_value, layer.weights.value, grad_pixel)
        return grad_x, gradients, grad_earlier_keys

    def backward_of_x(
        self, grad: Tensor, grad_value: Tensor, weight: Tensor | None, grad_pixel: PixelGrad
    ) -> Tensor:
        """Gradient of x or, with add_relu, of c; the own value is dw(x; weight) or, without, x."""
        grad_x = torch.empty_like(self.x)
        self.passes.convolve_backward(
            grad_value,
            weight,
            grad_pixel=grad_pixel,
            extra_grad=grad if self.layer.fuses_norm else None,
            relu_output=self.x if self.layer.add_relu else None,
            grad_x=grad_x,
        )
        return grad_x


class MLASteps(BaseSteps):
    """MLA likewise: the values are maps x, and the convolution comes after their weighted sum."""

    def write_output(self, *, out: Tensor) -> None:
        """Write y, or o before a batch norm in training."""
        self.passes.convolve(
            self.sum_maps(),
            self.layer.weights.value,
            offset=self.saved.offset,
            # A history without a slope is added as it is; here it is the residual.
            history=self.x if self.layer.fuses_norm else None,
            out=out,
        )

    def sum_maps(self) -> Tensor:
        """Weighted sum of the values."""
        total = torch.empty_like(self.x)
        saved = self.saved
        self.passes.weighted_sum(self.values, saved.scores, gain=saved.gain, out=total)
        return total

    def backward(
        self, grad: Tensor, grad_pooled: Tensor | None, grad_values: Sequence[Tensor]
    ) -> tuple[Tensor, Parameters, Tensor | None]:
        """See `BaseSteps.backward`; given is the gradient of the average in place of the keys'."""
        passes, layer, saved, x = self.passes, self.layer, self.saved, self.x
        total = self.sum_maps()
        sums = passes.grid_sums(grad, total, convolved=True, sum_grad=layer.fuses_norm)
        grad_total = total  # the memory of total is free again
        passes.convolve_backward(
            grad, layer.weights.value, grad_pixel=PixelGrad(), grad_x=grad_total
        )
        value_sums = passes.weighted_sum_backward(
            grad_total,
            self.values,
            saved.scores,
            gain=saved.gain,
            grad_values=grad_values,
            sum_grad=False,
        )
        grad_pixel, gradients, grad_earlier_keys = passes.base_coefficients_backward(
            saved, layer, x.shape, sums, value_sums, grad_pooled=grad_pooled
        )
        grad_x = self.backward_of_x(grad, grad_values[-1], None, grad_pixel)
        return grad_x, gradients, grad_earlier_keys


def base_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    memory: Sequence[Tensor],
    *,
    heads: int,
    add_relu: bool = False,
    norm: BatchNorm | None = None,
    is_mla: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """MRLA-base by a fused path; see the module for the equations.

    Arguments are those of `light_fused`, and the memory of the stage's earlier layers: their keys
    (B, T - 1, C) and their T - 1 values (B, C, H, W), nothing at T = 1. Keys of MLA are by this
    layer's f_K. Returned are y (B, C, H, W) and the memory with this layer's key and value; of MLA
    with the average of x (B, C) in place of the keys.
    """
    c = c.contiguous(memory_format=autograd.dense_format(c))
    shortcut = autograd.match_layout(shortcut, c) if add_relu else None
    keys, *values = memory or (None,)
    values = [autograd.match_layout(value, c) for value in values]
    parameters = Parameters.pack(weights, norm)
    settings = dict(heads=heads, add_relu=add_relu)
    options = autograd.Options.after_self_check(
        path, c, parameters, norm, **settings, is_mla=is_mla, depth=len(values) + 1
    )
    if options.has_failed():
        layer = mla_layer if is_mla else base_layer
        return layer(c, shortcut, weights, (keys, *values), **settings, norm=norm)
    y, *memory = BaseFunction.apply(options, c, shortcut, *parameters, keys, *values)
    return y, tuple(memory)


mla_fused = partial(base_fused, is_mla=True)
