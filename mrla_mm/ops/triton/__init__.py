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

from mrla_mm.ops.coefficients import Saved
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import Outcome, describe, give_up
from mrla_mm.ops.torch_passes import TorchPasses
from mrla_mm.ops.triton import gate, launch, reduce, stencil


class TorchFallback(TorchPasses):
    """Torch's passes beside kernels."""

    def some_values_backward(self, grad, values, scores, *, first=0, **options) -> Tensor:
        """See `reduce.some_values_backward`."""
        scores = scores[:, first : first + len(values)]
        return self.weighted_sum_backward(grad, values, scores, sum_grad=True, **options)

    def light_coefficients(self, *args) -> Saved:
        """Return tensors that kernels can read."""
        return contiguous(super().light_coefficients(*args))

    def base_coefficients(self, *args) -> Saved:
        """Return tensors that kernels can read."""
        return contiguous(super().base_coefficients(*args))


def contiguous(saved: Saved) -> Saved:
    """Saved tensors as the kernels can read them."""
    return Saved(*[None if tensor is None else tensor.contiguous() for tensor in saved])


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
    """Passes as kernels; averages and sums have a part for each span of the grid.

    `outcome` is that of the proof of the layer that they are for, None while it is tried.
    """

    def __init__(self, outcome: Outcome | None = None):
        self.outcome = outcome

    add_relu = or_torch(reduce.add_relu)
    convolve = or_torch(stencil.convolve)
    convolve_backward = or_torch(stencil.convolve_backward)
    grid_sums = or_torch(stencil.grid_sums)
    weighted_sum = or_torch(reduce.weighted_sum)
    some_values_backward = or_torch(reduce.some_values_backward)
    light_coefficients = or_torch(gate.light_coefficients)
    base_coefficients = or_torch(gate.base_coefficients)
    light_coefficients_backward = or_torch(gate.light_coefficients_backward)
    base_coefficients_backward = or_torch(gate.base_coefficients_backward)
    few_programs = staticmethod(launch.few_programs)

    def compile_key(self, shape: torch.Size, heads: int, channels_last: bool) -> Hashable:
        """See `Passes.compile_key`."""
        maps = shape, channels_last
        return stencil.compile_key(*maps), reduce.compile_key(*maps), gate.compile_key(shape, heads)

    def weighted_sum_backward(
        self, grad, values, scores, *, gain=None, grad_values, sum_grad
    ) -> Tensor:
        """A launch takes a few values, and each is a pass of its own: what it added stays added."""
        parts = []
        for first in range(0, len(values), reduce.MAX_VALUES):
            some = slice(first, first + reduce.MAX_VALUES)
            options = dict(gain=gain, grad_values=grad_values[some], first=first)
            parts.append(self.some_values_backward(grad, values[some], scores, **options))
        if len(parts) == 1:
            return parts[0]
        sums = [part.sum(0) for part in parts]  # (B, n + 1, C)
        values_sums = [total[:, :-1] for total in sums]
        return torch.cat((*values_sums, sums[-1][:, -1:]), 1).unsqueeze(0)
