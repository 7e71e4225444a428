"""How a Triton kernel is launched: on the GPU of its tensors, or in the interpreter."""

import os

import torch
import triton
from torch import Tensor


def launcher(kernel):
    """Kernel in the form that torch.compile sees through, for launches within an operator.

    Outside of operators, and for the interpreter, kernels are launched as they are.
    """
    return torch.library.wrap_triton(kernel) if isinstance(kernel, triton.runtime.JITFunction) else kernel


def launch(kernel, grid: tuple[int, ...], first: Tensor, *rest: object, **constants: object) -> None:
    """Launch a kernel on the GPU that its first tensor is on, whichever one is current."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *rest, **constants)


def mend_interpreter() -> None:
    """Let Triton's interpreter take loop bounds: it calls int() on arrays of one element; numpy >= 2.4 refuses."""
    from triton.runtime import interpreter

    original = getattr(interpreter, "_patch_lang_tensor", None)

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if original is not None:
        interpreter._patch_lang_tensor = patch


if os.environ.get("TRITON_INTERPRET") == "1":
    mend_interpreter()
