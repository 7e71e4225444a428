"""How the Triton kernels are launched, and what their grids share."""

import inspect
from contextlib import contextmanager
from functools import cache
from operator import itemgetter

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

ceil_div, next_power_of_2 = cache(triton.cdiv), cache(triton.next_power_of_2)  # 2 us a call
PROGRAMS_PER_PROCESSOR = 16  # of 128 threads: they fill a GPU, where a map is large enough
MANY = True  # whether to use them; see `Passes.few_programs`
# Numbers for all values of which a kernel is compiled once; all kernels call them by these names.
SIZES = frozenset(
    {"B", "H", "units", "tiles", "rows", "heads", "params_size", "value_spans", "spans", "first"}
)
PICK_CONSTANTS = {}  # by kernel, an itemgetter of its numbers that are not SIZES
KNOWN = {}  # compiled kernels by all that Triton compiles a kernel for
# Before Triton 3.3 launchers take no constants.
CAN_CACHE = "constexprs" in inspect.signature(ASTSource).parameters


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


class Unsupported(Exception):
    """There is no kernel for a layer."""


def programs(device: torch.device) -> int:
    """Number of programs that a launch shares large maps out to."""
    return count_programs(device) if MANY else 1


@contextmanager
def few_programs():
    """Share every map out to as few programs as there can be."""
    global MANY  # noqa: PLW0603  backward passes run in threads of autograd
    MANY = False
    try:
        yield
    finally:
        MANY = True


@cache
def count_programs(device: torch.device) -> int:
    """Number of programs that fill a device."""
    if device.type != "cuda":
        return 128 * PROGRAMS_PER_PROCESSOR
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * PROGRAMS_PER_PROCESSOR


def launch(
    kernel,
    grid: tuple[int, int, int],
    inputs: dict[str, Tensor | None],
    outputs: dict[str, Tensor | None],
    numbers: dict[str, int | float],
) -> None:
    """Launch a kernel on the GPU that its first tensor is on, whichever one is current.

    A second launch of a compiled kernel goes straight to it: finding it takes Triton several times
    as long on the host as the launch itself. Arguments come by the names of the kernel's
    parameters, and in their order: inputs and outputs, None for what is absent, then numbers. Those
    not in `SIZES` may take a kernel for each value.

    Raises:
        KernelError: the kernel did not run, and no output was written.
    """
    aligned = [  # at addresses as the allocator gives them, for which alone kernels are compiled
        tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor
        for tensor in inputs.values()
    ]
    tensors = *aligned, *outputs.values()  # outputs are always our own
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    pick = PICK_CONSTANTS.get(kernel.__name__)
    if pick is None:
        pick = itemgetter(*[name for name in numbers if name not in SIZES])
        PICK_CONSTANTS[kernel.__name__] = pick
    device = aligned[0].get_device()
    key = (kernel.__name__, device, pick(numbers), *dtypes)
    known = KNOWN.get(key)
    if known is None:
        assert [*inputs, *outputs, *numbers] == kernel.arg_names, kernel.__name__
    with torch.cuda.device(device):
        try:
            runner = (kernel if known is None else known)[grid]
            compiled = runner(*tensors, *numbers.values())
        except Exception as error:  # whatever Triton, a compiler, a disk or a driver may raise
            raise KernelError(f"{kernel.__name__}: {type(error).__name__}: {error}") from error
    if CAN_CACHE and compiled is not None:  # the interpreter and a known kernel return nothing
        KNOWN[key] = compiled
