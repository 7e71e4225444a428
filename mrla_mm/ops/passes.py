"""The interface of the passes over feature maps, which every implementation of the fused paths has.

    TorchPasses    plain PyTorch, on every device and in every dtype
    NumbaPasses    compiled loops for float32 on a CPU
    TritonPasses   kernels for a GPU

A layer runs `add_relu`, computes its coefficients, and writes y; later it runs its backward method:

    light_coefficients, apply               light_backward
    base_coefficients, base_output          base_backward
    base_coefficients, mla_output           mla_backward

The methods of layers are written here in terms of the others: the abstract ones, which read and
write maps, and those that compute coefficients from small tensors.

Shapes are those of `mrla_mm.ops`: maps (B, C, H, W) of one dtype and one dense layout, coefficients
(B, C), keys (B, T, C). Maps are read-only but for the arguments out, grad_x, grad_history and
grad_values: the caller allocates these, a pass writes every element, and none shares memory with
another argument unless the method says so. Results of `add_relu`, `grid_sums` and
`weighted_sum_backward` are opaque: only the same object's methods for coefficients may read them.
So an implementation may return partial sums in a form of its own, whatever the annotation says.
"""

import abc
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mrla_mm.ops import coefficients as torch_coefficients
from mrla_mm.ops.coefficients import Coefficients, GridSums, Layer, Parameters, Saved, ValueSums


class Passes(abc.ABC):
    """Passes over maps; the module has what all methods share."""

    def constants(self, shape: torch.Size, heads: int, channels_last: bool) -> Hashable:
        """What compiled code depends on of a map's shape: equal constants run the same code."""
        return ()

    def few_programs(self) -> AbstractContextManager:
        """For self-checks: launch few programs, so that each has many tiles of a small map too."""
        return nullcontext()

    @abc.abstractmethod
    def add_relu(
        self, c: Tensor, shortcut: Tensor | None, *, out: Tensor, pool: bool
    ) -> Tensor | None:
        """Write x = relu(c + shortcut); return its averages over the grid if `pool`, else None.

        The averages are those of x as it is rounded to its dtype. Without a shortcut it only pools:
        x and out are c itself.
        """

    @abc.abstractmethod
    def apply(
        self,
        x: Tensor,
        weight: Tensor | None,
        coefficients: Coefficients,
        *,
        history: Tensor | None = None,
        residual: bool = False,
        out: Tensor,
    ) -> None:
        """Write [x +] gain dw(x; weight) [+ slope history] + offset.

        The weight (C, 1, 3, 3) is that of the depthwise convolution; without one dw(x) is x. With
        `residual` x itself is added, before anything is rounded to a half-precision dtype.
        """

    @abc.abstractmethod
    def apply_backward(
        self,
        grad: Tensor,
        weight: Tensor | None,
        coefficients: Coefficients,
        *,
        grad_pixel: Tensor | None = None,
        extra_grad: Tensor | None = None,
        residual: bool = False,
        relu_output: Tensor | None = None,
        grad_x: Tensor,
        grad_history: Tensor | None = None,
    ) -> None:
        """Write the gradients of x and, if asked for, of the history: the transpose of `apply`.

        Args; others are those of `apply`, whose offset has no part in this:
            grad: gradient of what `apply` wrote.
            grad_pixel: what is added to the gradient of every pixel of x (B, C).
            extra_grad: map that is added to the gradient of x; not together with grad_history.
            relu_output: x = relu(c + shortcut), if grad_x is to be the gradient of c: it is zeroed
                where x is 0, extra_grad included.
            grad_history: receives slope times grad. With `relu_output` the history is the shortcut,
                so grad_x is added.
        """

    @abc.abstractmethod
    def grid_sums(
        self,
        grad: Tensor,
        x: Tensor,
        *,
        history: Tensor | None = None,
        convolved: bool,
        with_grad: bool,
    ) -> GridSums:
        """Sum over the grid, in at least single precision, or return partial sums of that.

        Of grad times x: with `convolved` shifted to each of the nine places under the kernel. Of
        grad times the history. And, `with_grad`, of grad.
        """

    @abc.abstractmethod
    def weighted_sum(
        self,
        values: Sequence[Tensor],
        scores: Tensor,
        coefficients: Coefficients,
        *,
        x: Tensor | None = None,
        out: Tensor,
    ) -> None:
        """Write [x +] gain sum_s scores_s values_s + offset, reading each of the T values once.

        Scores are (B, T, G).
        """

    @abc.abstractmethod
    def weighted_sum_backward(
        self,
        grad: Tensor,
        values: Sequence[Tensor],
        scores: Tensor,
        gain: Tensor | None,
        *,
        grad_values: Sequence[Tensor],
        with_grad: bool,
    ) -> ValueSums:
        """Add gain scores_s grad to each of T grad_values; return sums as `grid_sums` does.

        They are of grad times each value and, `with_grad`, of grad.
        """

    # Triton overrides these: its averages and sums are partial.
    light_coefficients = staticmethod(torch_coefficients.light_coefficients)
    base_coefficients = staticmethod(torch_coefficients.base_coefficients)
    light_coefficients_backward = staticmethod(torch_coefficients.light_coefficients_backward)
    base_coefficients_backward = staticmethod(torch_coefficients.base_coefficients_backward)

    def mla_coefficients_backward(
        self, saved: Saved, layer: Layer, size: torch.Size, sums: GridSums, value_sums: ValueSums
    ) -> tuple[Tensor, Parameters, Tensor | None]:
        """As of base, but the sum of the output's gradient is among `sums`."""
        value_sums = value_sums._replace(grad=sums.grad)
        return self.base_coefficients_backward(saved, layer, size, sums, value_sums, None)

    def light_backward(
        self,
        grad: Tensor,
        x: Tensor,
        history: Tensor | None,
        layer: Layer,
        saved: Saved,
        *,
        grad_x: Tensor,
        grad_history: Tensor | None,
    ) -> Parameters:
        """Write the gradients of the maps; return those of the parameters. grad is that of y.

        With a layer's add_relu, grad_x is the gradient of c, and grad_history that of the shortcut.
        """
        weight = layer.weights.value
        options = dict(convolved=weight is not None, with_grad=layer.norm is not None)
        sums = self.grid_sums(grad, x, history=history, **options)
        grad_pixel, gradients = self.light_coefficients_backward(saved, layer, x.shape, sums)
        self.apply_backward(
            grad,
            weight,
            saved.coefficients,
            grad_pixel=grad_pixel,
            residual=layer.adds_residual,
            relu_output=x if layer.add_relu else None,
            grad_x=grad_x,
            grad_history=grad_history,
        )
        return gradients

    def base_output(
        self, x: Tensor, values: Sequence[Tensor], layer: Layer, saved: Saved, *, out: Tensor
    ) -> None:
        """Write y of MRLA-base, given its coefficients and all T values."""
        residual = x if layer.adds_residual else None
        self.weighted_sum(values, saved.attention.scores, saved.coefficients, x=residual, out=out)

    def base_backward(
        self,
        grad: Tensor,
        grad_keys: Tensor | None,
        x: Tensor,
        values: Sequence[Tensor],
        layer: Layer,
        saved: Saved,
        *,
        grad_values: Sequence[Tensor],
        grad_x: Tensor,
    ) -> tuple[Parameters, Tensor | None]:
        """Write grad_x and add to grad_values; return the gradients of parameters, earlier keys.

        grad is that of y; grad_keys (B, T, C) and grad_values come with what later layers make of
        keys and values. With a layer's add_relu, grad_x is the gradient of c.
        """
        scores, gain = saved.attention.scores, saved.coefficients.gain
        options = dict(grad_values=grad_values, with_grad=layer.norm is not None)
        value_sums = self.weighted_sum_backward(grad, values, scores, gain, **options)
        sums = self.grid_sums(grad_values[-1], x, convolved=True, with_grad=False)
        grad_pixel, gradients, grad_earlier_keys = self.base_coefficients_backward(
            saved, layer, x.shape, sums, value_sums, grad_keys
        )
        weight = layer.weights.value
        self.own_value_backward(grad, grad_values[-1], x, layer, weight, grad_pixel, grad_x=grad_x)
        return gradients, grad_earlier_keys

    def own_value_backward(
        self,
        grad: Tensor,
        grad_value: Tensor,
        x: Tensor,
        layer: Layer,
        weight: Tensor | None,
        grad_pixel: Tensor,
        *,
        grad_x: Tensor,
    ) -> None:
        """Write grad_x, given the gradients of y and of the layer's own value dw(x; weight)."""
        self.apply_backward(
            grad_value,
            weight,
            Coefficients(),
            grad_pixel=grad_pixel,
            extra_grad=grad if layer.adds_residual else None,
            relu_output=x if layer.add_relu else None,
            grad_x=grad_x,
        )

    def mla_output(
        self, x: Tensor, values: Sequence[Tensor], layer: Layer, saved: Saved, *, out: Tensor
    ) -> None:
        """Write y of MLA, given its coefficients and all T values."""
        gain, _, offset = saved.coefficients
        total = torch.empty_like(x)
        self.weighted_sum(values, saved.attention.scores, Coefficients(gain=gain), out=total)
        residual = x if layer.adds_residual else None
        # `apply` adds a history without a slope as it is; here it is the residual.
        weight = layer.weights.value
        self.apply(total, weight, Coefficients(offset=offset), history=residual, out=out)

    def mla_backward(
        self,
        grad: Tensor,
        grad_averages: Tensor | None,
        x: Tensor,
        values: Sequence[Tensor],
        layer: Layer,
        saved: Saved,
        *,
        grad_values: Sequence[Tensor],
        grad_x: Tensor,
    ) -> tuple[Parameters, Tensor | None]:
        """As `base_backward`, but later layers use the averages of x (B, C) in place of a key."""
        scores, gain = saved.attention.scores, saved.coefficients.gain
        total = torch.empty_like(x)
        self.weighted_sum(values, scores, Coefficients(gain=gain), out=total)
        sums = self.grid_sums(grad, total, convolved=True, with_grad=layer.norm is not None)
        grad_total = total  # whose elements nothing needs any more
        self.apply_backward(grad, layer.weights.value, Coefficients(), grad_x=grad_total)
        options = dict(grad_values=grad_values, with_grad=False)
        value_sums = self.weighted_sum_backward(grad_total, values, scores, gain, **options)
        grad_pixel, gradients, grad_earlier_keys = self.mla_coefficients_backward(
            saved, layer, x.shape, sums, value_sums
        )
        if grad_averages is not None:
            grad_pixel = grad_pixel + grad_averages / (x.shape[2] * x.shape[3])
        self.own_value_backward(grad, grad_values[-1], x, layer, None, grad_pixel, grad_x=grad_x)
        return gradients, grad_earlier_keys
