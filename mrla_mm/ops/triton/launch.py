"""How the Triton kernels are launched, and what their grids share."""

import inspect
from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

ceil_div, next_power_of_2 = cache(triton.cdiv), cache(triton.next_power_of_2)  # 2 us a call
PROGRAMS = 2048  # enough to fill a GPU, where a map is large enough
KNOWN = {}  # launchers of compiled kernels by all that Triton compiles a kernel for, and the grid
MAX_KNOWN = 4096  # then all are dropped: images of many sizes make many grids
# Before Triton 3.3 launchers take no constants.
CAN_CACHE = "constexprs" in inspect.signature(ASTSource).parameters


def launch(kernel, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], *rest) -> None:
    """Launch a kernel on the GPU that its first tensor is on, whichever one is current.

    A second launch with arguments like an earlier one's goes straight to the compiled kernel:
    finding it takes Triton several times as long on the host as the launch itself. The kernel's
    parameters are tensors, None for what is absent, then numbers, then constants.
    """
    key = [kernel.__name__, tensors[0].get_device(), grid, rest]
    bits = 0
    for tensor in tensors:
        key.append(tensor if tensor is None else tensor.dtype)
        bits |= 0 if tensor is None else tensor.data_ptr()
    # Triton compiles another kernel for addresses that are not aligned.
    key = None if bits % 16 else tuple(key)
    with torch.cuda.device_of(tensors[0]):
        known = KNOWN.get(key)
        if known is not None:
            known(*tensors, *rest)
            return
        compiled = kernel[grid](*tensors, *rest)
        if CAN_CACHE and key and compiled is not None:  # the interpreter returns nothing
            if len(KNOWN) >= MAX_KNOWN:
                KNOWN.clear()
            KNOWN[key] = compiled[grid]
