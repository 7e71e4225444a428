"""Which implementation of layer attention runs on a feature map, and why.

    naive    the equations in plain PyTorch (`reference`), differentiated by autograd
    fused    plain PyTorch too, in few passes over memory (`torch_passes`)
    numba    the same passes as loops that numba compiles
    triton   the same passes as Triton kernels

CUDA tensors take Triton, float32 tensors of a CPU numba, all others the fused path. Compiled code
proves itself: each form of a layer that it is compiled for is compared with the reference before it
is used (`proof`), and where it is wrong, or fails then or later, the naive path runs from then on.
The environment variable MRLA_OPS forces one of the four, and InputError is raised where that one
cannot run. Under tracers and compilers the naive path runs: torch.compile does its own fusing.
"""

import importlib
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from mrla_mm.errors import InputError
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import ENVIRONMENT, Outcome, describe
from mrla_mm.ops.torch_passes import TorchPasses
from mrla_mm.torch_support import is_compiling, is_dynamo_compiling, openmp_parallel

PATHS = ("naive", "fused", "numba", "triton")
TRITON_DEVICE = "cuda"
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """A path and the reason for it."""

    path: str
    reason: str


def is_exporting() -> bool:
    """Whether torch.export (not strict) or the ONNX exporter traces, without Dynamo."""
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
    device = x.device.type
    if device != TRITON_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton does not run on {device} (TRITON_INTERPRET=1 interprets it there)"
    return why_not_importable("triton", "Triton 3")


def why_not_numba(x: Tensor) -> str:
    """Return why the compiled loops cannot take a feature map, or an empty string."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return f"the loops are for torch.float32 on a CPU, not {x.dtype} on {x.device.type}"
    if type(x) is not Tensor:
        return f"a {type(x).__name__} may have no memory of its own"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "NUMBA_DISABLE_JIT is set"
    if torch.get_num_threads() > 1 and openmp_parallel() is None:
        return "the loops cannot use torch's threads here; with one thread they need none"
    return why_not_importable("numba_passes", "numba")


@cache
def why_not_importable(module: str, library: str) -> str:
    """Return why a module of this folder cannot be used, or an empty string."""
    try:
        importlib.import_module(f"mrla_mm.ops.{module}")
    except ImportError as error:
        return f"{library} is not installed ({error})"
    except Exception as error:  # whatever a broken installation raises
        return f"{library} cannot be imported ({describe(error)})"
    return ""


def choose_path(x: Tensor) -> Choice:
    """Choose the implementation for a feature map (B, C, H, W); see the module for MRLA_OPS."""
    if forced := os.environ.get(ENVIRONMENT):
        return forced_path(forced, x)
    if obstacle := why_not_fused(x):
        return Choice("naive", obstacle)
    if x.device.type == TRITON_DEVICE:
        obstacle = why_not_triton(x)
        return Choice("naive", obstacle) if obstacle else Choice("triton", "the tensor is on a GPU")
    obstacle = why_not_numba(x)
    return Choice("fused", obstacle) if obstacle else Choice("numba", "the tensor is on a CPU")


def forced_path(path: str, x: Tensor) -> Choice:
    """The path that MRLA_OPS asks for."""
    if path not in PATHS:
        raise InputError(f"{ENVIRONMENT}={path!r} is unknown; use one of {', '.join(PATHS)}")
    obstacle = "" if path == "naive" else why_not_fused(x)
    if path == "triton" and not obstacle:
        obstacle = why_not_triton(x)
    if path == "numba" and not obstacle:
        obstacle = why_not_numba(x)
    if obstacle:
        raise InputError(f"{ENVIRONMENT}={path} cannot run here: {obstacle}; unset {ENVIRONMENT}")
    return Choice(path, f"{ENVIRONMENT} asks for it")


@cache
def passes_of(path: str, outcome: Outcome | None = None) -> Passes:
    """The passes over maps of a fused path, for a layer whose proof had an outcome."""
    if path == "triton":
        from mrla_mm.ops.triton import TritonPasses

        return TritonPasses(outcome)
    if path == "numba":
        from mrla_mm.ops.numba_passes import NumbaPasses

        return NumbaPasses()
    return TorchPasses()
