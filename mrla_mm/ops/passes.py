"""The interface of the passes over feature maps, which every implementation of the fused paths has.

    TorchPasses    plain PyTorch, on every device and in every dtype
    NumbaPasses    compiled loops for float32 on a CPU
    TritonPasses   kernels for a GPU

`light` and `base` say in which order a layer runs them. The abstract methods read and write maps;
those for coefficients take small tensors.

Gain, slope and offset are (B, C), None where they are 1, 1 and 0; `coefficients` says what its
functions compute.

Averages and sums over the grid come in S parts, one or more, which are to be added up:

    averages     (S, B, C)
    grid sums    (S, B, n + 2, C)  of a gradient times x at each of the kernel's n taps, of it times
                                   the history, and of it
    value sums   (S, B, T + 1, C)  of a gradient times each value, and of it

Maps (B, C, H, W) have one dtype and one dense layout. A pass writes every element of the arguments
out, grad_x and grad_history, which the caller allocates, and adds to grad_values; it only reads the
other maps. No output shares memory with another argument unless the method says so.
"""

import abc
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mrla_mm.ops import coefficients


class Passes(abc.ABC):
    """Passes over maps; the module says what all methods share."""

    def compile_key(self, shape: torch.Size, heads: int, channels_last: bool) -> Hashable:
        """What compiled code depends on of a map's shape: equal keys run the same code."""
        return ()

    def few_programs(self) -> AbstractContextManager:
        """For self-checks: launch few programs, so that each has many tiles of a small map too."""
        return nullcontext()

    @abc.abstractmethod
    def add_relu(
        self, c: Tensor, shortcut: Tensor | None, *, out: Tensor, pool: bool
    ) -> Tensor | None:
        """Write x = relu(c + shortcut); return its averages if `pool`, else None.

        The averages are those of x as it is rounded to its dtype. Without a shortcut it only pools:
        x and out are c itself.
        """

    @abc.abstractmethod
    def convolve(
        self,
        x: Tensor,
        weight: Tensor | None,
        *,
        gain: Tensor | None = None,
        slope: Tensor | None = None,
        offset: Tensor | None = None,
        history: Tensor | None = None,
        residual: bool = False,
        out: Tensor,
    ) -> None:
        """Write [x +] gain dw(x; weight) [+ slope history] + offset.

        The weight (C, 1, 3, 3) is that of the depthwise convolution; without one dw(x) is x. With
        `residual` x itself is added, before anything is rounded to a half-precision dtype.
        """

    @abc.abstractmethod
    def convolve_backward(
        self,
        grad: Tensor,
        weight: Tensor | None,
        *,
        gain: Tensor | None = None,
        slope: Tensor | None = None,
        grad_pixel: coefficients.PixelGrad,
        extra_grad: Tensor | None = None,
        residual: bool = False,
        relu_output: Tensor | None = None,
        grad_x: Tensor,
        grad_history: Tensor | None = None,
    ) -> None:
        """Write the gradients of x and, if asked for, of the history: the transpose of `convolve`.

        Args; others are those of `convolve`:
            grad: gradient of what `convolve` wrote.
            grad_pixel: what the methods for coefficients return, to finish and to add to grad_x.
            extra_grad: map that is added to the gradient of x; not with slope or grad_history.
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
        sum_grad: bool,
    ) -> Tensor:
        """Return the grid sums in at least float32, of nine taps with `convolved`, else of one.

        Those of an absent history and, without `sum_grad`, of grad have no meaning.
        """

    @abc.abstractmethod
    def weighted_sum(
        self,
        values: Sequence[Tensor],
        scores: Tensor,
        *,
        gain: Tensor | None = None,
        offset: Tensor | None = None,
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
        *,
        gain: Tensor | None = None,
        grad_values: Sequence[Tensor],
        sum_grad: bool,
    ) -> Tensor:
        """Add gain scores_s grad to each of T grad_values; return the value sums.

        That of grad has no meaning without `sum_grad`.
        """

    light_coefficients = staticmethod(coefficients.light_coefficients)
    base_coefficients = staticmethod(coefficients.base_coefficients)
    light_coefficients_backward = staticmethod(coefficients.light_coefficients_backward)
    base_coefficients_backward = staticmethod(coefficients.base_coefficients_backward)
