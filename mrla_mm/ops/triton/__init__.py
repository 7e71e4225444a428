"""The passes of fused layer attention as Triton kernels; the interface is `Passes`.

Values are loaded in the map's precision, computed in float32 and rounded once, when stored. Where a
kernel sums, each program writes the sum of its span of the grid, and the spans are added up
afterwards in one order: nothing is added atomically, so results are the same to the bit in every
run. Contiguous and channels-last maps of any size are read as they lie.

The kernels run on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1 before Triton
is imported).
"""

import triton.backends  # noqa: F401  which Triton 2 lacks: the kernels are not written for it
from torch import Tensor

from mrla_mm.ops.passes import Passes
from mrla_mm.ops.triton import gate, reduce, stencil


class TritonPasses(Passes):
    """Passes as kernels; averages and sums are partial ones, of each span of the grid."""

    add_relu = staticmethod(reduce.add_relu)
    apply = staticmethod(stencil.apply)
    apply_backward = staticmethod(stencil.apply_backward)
    grid_sums = staticmethod(stencil.grid_sums)
    weighted_sum = staticmethod(reduce.weighted_sum)
    weighted_sum_backward = staticmethod(reduce.weighted_sum_backward)
    light_coefficients = staticmethod(gate.light_coefficients)
    base_coefficients = staticmethod(gate.base_coefficients)
    light_coefficients_backward = staticmethod(gate.light_coefficients_backward)
    base_coefficients_backward = staticmethod(gate.base_coefficients_backward)
    mla_coefficients_backward = staticmethod(gate.mla_coefficients_backward)

    def chunks(self, x: Tensor) -> tuple[None]:
        """All of the batch: a kernel's programs share it out."""
        return (None,)
