"""Which implementation of layer attention runs on a feature map, and why.

    naive    the equations in plain PyTorch (`reference`), differentiated by autograd
    fused    plain PyTorch too, in few passes over memory (`cpu`)
    triton   the same passes as Triton kernels

CUDA tensors take Triton where it works, all others the fused path. The environment variable
MRLA_OPS forces one of the three. Under tracers and compilers the naive path runs: torch.compile
does its own fusing.
"""

import os
import warnings
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from mrla_mm.errors import InputError
from mrla_mm.torch_support import is_compiling, is_dynamo_compiling

PATHS = ("naive", "fused", "triton")
ENVIRONMENT = "MRLA_OPS"
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """A path and the reason for it."""

    path: str
    reason: str


def is_exporting() -> bool:
    """Whether torch.export (not strict) or the ONNX exporter traces: unlike torch.compile, without Dynamo."""
    return is_compiling() and not is_dynamo_compiling()


def why_not_fused(x: Tensor) -> str:
    """Return why only the naive path can take a feature map, or an empty string."""
    if not isinstance(x, Tensor):
        return "torch.fx traces plain operators only"
    if is_compiling():
        return "a compiler or exporter does its own fusing"
    if torch.jit.is_tracing():
        return "torch.jit traces plain operators only"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a torch.func transform or forward-mode differentiation is active"
    if not x.is_floating_point():
        return f"{x.dtype} is not a floating-point type"
    return "" if x.numel() else "the map is empty"


def why_not_triton(x: Tensor) -> str:
    """Return why Triton cannot take a feature map, or an empty string."""
    if x.dtype not in TRITON_DTYPES:
        return f"the kernels do not compute in {x.dtype}"
    if x.numel() >= len(x) * 2**31:
        return "a sample has 2^31 or more elements"
    if isinstance(x, FakeTensor):
        return "a fake tensor has no memory"
    try:
        return why_triton_fails(x.device, x.dtype, x.stride(1) == 1)
    except UntriedError:
        return ""


class UntriedError(Exception):
    """A CUDA graph is being captured, in which nothing can be tried."""


@cache
def why_triton_fails(device: torch.device, dtype: torch.dtype, last: bool) -> str:
    """Launch one kernel and return why that fails, or an empty string; once per device, dtype and layout.

    Triton builds its launchers while the program runs, which needs a C compiler and a driver that
    it knows. A lack of memory is no such reason: it is raised, and the next call tries again.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton does not run on {device.type} (TRITON_INTERPRET=1 interprets it there)"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UntriedError
    x = torch.zeros(1, 16, 4, 4, device=device, dtype=dtype)
    try:
        for _ in range(2):  # the second launch goes to the compiled kernel at once
            passes_of("triton").pool(x.contiguous(memory_format=torch.channels_last) if last else x)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a driver or Triton itself may raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        warnings.warn(
            f"layer attention runs without Triton on {device} in {dtype} ({reason})", stacklevel=2
        )
        return reason
    return ""


def choose_path(x: Tensor) -> Choice:
    """Choose the implementation for a feature map (B, C, H, W).

    Raises:
        InputError: MRLA_OPS names no path, or one that cannot run here.
    """
    forced = os.environ.get(ENVIRONMENT, "")
    if forced and forced not in PATHS:
        raise InputError(
            f"{ENVIRONMENT}={forced!r} is unknown; use one of {', '.join(PATHS)}, or unset it"
        )
    if forced == "naive":
        return Choice("naive", f"{ENVIRONMENT} asks for it")
    obstacle = why_not_fused(x)
    if obstacle and not forced:
        return Choice("naive", obstacle)
    if forced == "triton" or (not forced and x.device.type == "cuda"):
        obstacle = obstacle or why_not_triton(x)
        if not forced:
            return (
                Choice("fused", obstacle)
                if obstacle
                else Choice("triton", "the tensor is on a GPU")
            )
    if obstacle:
        raise InputError(f"{ENVIRONMENT}={forced} cannot run here: {obstacle}; unset {ENVIRONMENT}")
    return Choice(
        forced or "fused", f"{ENVIRONMENT} asks for it" if forced else "the tensor is not on a GPU"
    )


def passes_of(path: str) -> ModuleType:
    """Return the module with the passes over maps of a fused path."""
    if path == "triton":
        from mrla_mm.ops import triton

        return triton
    from mrla_mm.ops import cpu

    return cpu
