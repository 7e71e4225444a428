"""The passes of fused layer attention as Triton kernels; the interface is that of `cpu`.

Values are loaded in the map's precision, computed in float32 and rounded once, when stored. Where a
kernel sums, each program writes the sum of its span of the grid, and the spans are added up
afterwards in one order: nothing is added atomically, so results are the same to the bit in every
run. Contiguous and channels-last maps of any size are read as they lie.

The kernels run on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1 before Triton
is imported).
"""

import triton.backends  # noqa: F401  which Triton 2 lacks: the kernels are not written for it
from torch import Tensor

from mrla_mm.ops.triton.gate import base_backward, base_state, light_backward, light_state
from mrla_mm.ops.triton.reduce import add_relu, weighted_sum, weighted_sum_backward
from mrla_mm.ops.triton.stencil import apply, apply_backward, grid_sums, take_shift


def chunks(x: Tensor) -> tuple[None]:
    """None, for the whole batch: a kernel's programs share it out."""
    return (None,)
