"""The passes of fused layer attention as Triton kernels; the interface is `Passes`.

Values are loaded in the map's precision, computed in float32 and rounded once, when stored. Where a
kernel sums, each program writes the sum of its span of the grid, and the spans are added up
afterwards in one order: nothing is added atomically, so results are the same to the bit in every
run. Contiguous and channels-last maps of any size are read as they lie.

The kernels run on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1 before Triton
is imported).
"""

from collections.abc import Callable, Hashable
from functools import wraps

import torch
import triton.backends  # noqa: F401  which Triton 2 lacks: the kernels are not written for it
from torch import Tensor

from mrla_mm.ops.coefficients import Attention, Coefficients, GridSums, Saved, ValueSums
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import Outcome, describe, give_up
from mrla_mm.ops.torch_passes import TorchPasses
from mrla_mm.ops.triton import gate, launch, reduce, stencil


class TorchFallback(TorchPasses):
    """Torch's passes with the partial sums of kernels: a first dimension of spans, here of one."""

    def add_relu(self, c, shortcut, *, out, pool) -> Tensor | None:
        """Averages (1, B, C)."""
        averages = super().add_relu(c, shortcut, out=out, pool=pool)
        return None if averages is None else averages.unsqueeze(0)

    def grid_sums(self, grad, x, **options) -> Tensor:
        """Sums (1, B, n + 2, C)."""
        sums = super().grid_sums(grad, x, **options)
        absent = sums.taps.new_zeros(x.shape[:2])
        others = [absent if total is None else total for total in (sums.history, sums.grad)]
        return torch.cat((sums.taps.mT, torch.stack(others, 1)), 1).unsqueeze(0)

    def weighted_sum_backward(self, grad, values, scores, gain, *, first=0, **options) -> Tensor:
        """Sums (1, B, n + 1, C) of some of the values."""
        scores = scores[:, first : first + len(values)]
        sums = super().weighted_sum_backward(grad, values, scores, gain, sum_grad=True, **options)
        return torch.cat((sums.values, sums.grad.unsqueeze(1)), 1).unsqueeze(0)

    def light_coefficients(self, pooled, layer, size) -> Saved:
        """For averages (spans, B, C)."""
        pooled = None if pooled is None else pooled.sum(0)
        return contiguous(super().light_coefficients(pooled, layer, size))

    def base_coefficients(self, pooled, layer, earlier_keys) -> Saved:
        """For averages (spans, B, C)."""
        return contiguous(super().base_coefficients(pooled.sum(0), layer, earlier_keys))

    def light_coefficients_backward(self, saved, layer, size, sums):
        """For sums (spans, B, n + 2, C)."""
        return super().light_coefficients_backward(saved, layer, size, add_spans(sums, layer))

    def base_coefficients_backward(self, saved, layer, size, sums, value_sums, *grads):
        """For sums (spans, B, n + 2, C) and (spans, B, T + 1, C)."""
        sums = add_spans(sums, layer)
        total = value_sums.sum(0)
        value_sums = ValueSums(total[:, :-1], total[:, -1])
        return super().base_coefficients_backward(saved, layer, size, sums, value_sums, *grads)

    def convolve_backward(self, grad, *args, grad_pixel=None, **options) -> None:
        """For an `AveragesGradient` too."""
        if isinstance(grad_pixel, gate.AveragesGradient):
            grad_pixel = grad_pixel.finish(pixels=grad.shape[2] * grad.shape[3])
        super().convolve_backward(grad, *args, grad_pixel=grad_pixel, **options)


def contiguous(saved: Saved) -> Saved:
    """Saved tensors as the kernels can read them."""
    attention, coefficients = (
        [None if tensor is None else tensor.contiguous() for tensor in tensors] for tensors in saved
    )
    return Saved(Attention(*attention), Coefficients(*coefficients))


def add_spans(sums: Tensor, layer) -> GridSums:
    """What `stencil.grid_sums` returns as the `GridSums` of torch's passes."""
    total = sums.sum(0)  # (B, n + 2, C)
    of_history = total[:, -2] if layer.has_history else None
    return GridSums(total[:, :-2].mT, of_history, total[:, -1])


def or_torch(kernel_pass: Callable) -> Callable:
    """Run a pass by kernels, or from its start by torch where a kernel fails or there is none.

    No failing pass has changed what it reads, so it can start over, and the step is finished.
    """

    @wraps(kernel_pass)
    def run(self, *args, **kwargs):
        try:
            return kernel_pass(*args, **kwargs)
        except launch.Unsupported:
            pass
        except launch.KernelError as error:
            if self.outcome is None:
                raise
            give_up(self.outcome, f"a kernel failed: {describe(error)}")
        return getattr(TorchFallback(), kernel_pass.__name__)(*args, **kwargs)

    return run


class TritonPasses(Passes):
    """Passes as kernels; averages and sums are partial ones, of each span of the grid.

    `outcome` is that of the proof of the layer that they are for, None while it is tried.
    """

    def __init__(self, outcome: Outcome | None = None):
        self.outcome = outcome

    add_relu = or_torch(reduce.add_relu)
    convolve = or_torch(stencil.convolve)
    convolve_backward = or_torch(stencil.convolve_backward)
    grid_sums = or_torch(stencil.grid_sums)
    weighted_sum = or_torch(reduce.weighted_sum)
    some_values_backward = or_torch(reduce.weighted_sum_backward)
    light_coefficients = or_torch(gate.light_coefficients)
    base_coefficients = or_torch(gate.base_coefficients)
    light_coefficients_backward = or_torch(gate.light_coefficients_backward)
    base_coefficients_backward = or_torch(gate.base_coefficients_backward)
    few_programs = staticmethod(launch.few_programs)

    def compile_key(self, shape: torch.Size, heads: int, channels_last: bool) -> Hashable:
        """See `Passes.compile_key`."""
        maps = shape, channels_last
        return stencil.compile_key(*maps), reduce.compile_key(*maps), gate.compile_key(shape, heads)

    def weighted_sum_backward(self, grad, values, scores, gain, *, grad_values, sum_grad) -> Tensor:
        """Sums are of each span of the grid (spans, B, T + 1, C), the last of them of grad.

        A launch takes a few values, and each is a pass of its own: what it added stays added.
        """
        parts = []
        for first in range(0, len(values), reduce.MAX_VALUES):
            some = slice(first, first + reduce.MAX_VALUES)
            options = dict(grad_values=grad_values[some], first=first)
            parts.append(self.some_values_backward(grad, values[some], scores, gain, **options))
        if len(parts) == 1:
            return parts[0]
        sums = [part.sum(0) for part in parts]  # (B, n + 1, C)
        values_sums = [total[:, :-1] for total in sums]
        return torch.cat((*values_sums, sums[-1][:, -1:]), 1).unsqueeze(0)
