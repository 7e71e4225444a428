"""Which implementation of the layer-attention operators runs, and why.

    reference   the equations in plain PyTorch, differentiated by autograd
    folded      plain PyTorch too, but gate, lambda, normalisation and residual are folded into few passes over memory
    triton      the same passes as Triton kernels

The environment variable MRLA_OPS forces one of the three; without it CUDA tensors take Triton, where a trial shows that
it works, and all others folded.
"""

import os
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.ops.probe import why_triton_fails

PATHS = ("reference", "folded", "triton")
ENVIRONMENT = "MRLA_OPS"
# Whether a Triton that our kernels and torch.compile can use is installed.
HAS_TRITON = find_spec("triton") is not None and hasattr(torch.library, "triton_op")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """A path and the reason for it."""

    path: str
    reason: str


@torch.compiler.assume_constant_result
def requested_path() -> str:
    """Path that MRLA_OPS asks for, or an empty string; when compiled, read once, at compile time.

    Raises:
        InputError: for a value that names no path.
    """
    path = os.environ.get(ENVIRONMENT, "")
    if path and path not in PATHS:
        raise InputError(f"{ENVIRONMENT}={path!r} is unknown; use one of {', '.join(PATHS)}, or unset it")
    return path


@torch.compiler.assume_constant_result
def triton_interpreted() -> bool:
    """Whether Triton runs its kernels through its interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def is_exporting() -> bool:
    """Whether torch.export (not strict) or the ONNX exporter traces: unlike torch.compile, without Dynamo."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def why_not_fused(x: Tensor) -> str:
    """Reason why neither folded nor Triton can take a feature map, or an empty string."""
    if torch.jit.is_tracing():
        return "torch.jit traces plain operators only"
    if is_exporting():
        return "an exported program is to hold plain operators only"
    if torch.compiler.is_compiling() and not hasattr(torch.library, "custom_op"):
        return "torch.compile needs torch >= 2.4 to see through the fused operators"
    if not x.is_floating_point():
        return f"{x.dtype} is no floating-point type"
    return ""


def why_not_triton(x: Tensor) -> str:
    """Reason why Triton cannot take a feature map, or an empty string."""
    if not HAS_TRITON:
        return "Triton with torch >= 2.6 is not installed"
    if x.dtype not in TRITON_DTYPES:
        return f"the kernels do not compute in {x.dtype}"
    if x.device.type != "cuda" and not triton_interpreted():
        return f"Triton does not run on {x.device.type} (TRITON_INTERPRET=1 interprets it there)"
    return ""


def choose_path(x: Tensor) -> Choice:
    """Choose the implementation for a feature map (B, C, H, W).

    Raises:
        InputError: MRLA_OPS names no path, or one that cannot run here.
    """
    wanted = requested_path()
    if wanted == "reference":
        return Choice("reference", f"{ENVIRONMENT} asks for it")
    obstacle = why_not_fused(x)
    if not wanted and obstacle:
        return Choice("reference", obstacle)
    if wanted == "triton" or (not wanted and x.device.type == "cuda"):
        obstacle = obstacle or why_not_triton(x)
        if not wanted:
            if not obstacle and why_triton_fails(x.device):
                obstacle = "the Triton kernels do not work there"
            return Choice("folded", obstacle) if obstacle else Choice("triton", "the tensor is on a GPU")
    if obstacle:
        raise InputError(f"{ENVIRONMENT}={wanted} cannot run here: {obstacle}; unset {ENVIRONMENT}")
    return Choice(wanted, f"{ENVIRONMENT} asks for it") if wanted else Choice("folded", "the tensor is not on a GPU")
