"""Whether the Triton kernels work where they are about to run: they are tried once, on a few numbers.

Triton builds its launchers while the program runs. That needs a C compiler and a driver it knows, and many a machine
that trains well without Triton has neither; training then goes on by the folded path, with a warning.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from mrla_mm.ops import folded
from mrla_mm.ops.gating import Affine, Coefficients, Gate, LightWeights, MapSums


def numbers(*shape: int, device: torch.device, phase: float) -> Tensor:
    """Numbers between -1 and 1 that look random and leave every random state alone."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float32, device=device) * 12.9898 + phase).view(shape)


def outcomes(kernels, device: torch.device) -> list[Tensor]:
    """What each of the kernels makes of the same small maps."""
    x, grad, history = (numbers(2, 5, 3, 4, device=device, phase=phase) for phase in (0.0, 1.0, 2.0))
    per_channel = [numbers(1, 5, device=device, phase=phase) for phase in (3.0, 4.0)]
    coefficients = Coefficients(numbers(2, 5, 9, device=device, phase=5.0), *per_channel)
    weights = numbers(2, 5, 2, device=device, phase=6.0)
    sums, gradients = kernels.sum_backward(grad, weights, [x, history])
    activated, pooled = kernels.activate(x, history, pooled=True)
    return [
        activated,
        pooled,
        *kernels.block_backward(grad, x, coefficients, None),
        kernels.pool(x),
        kernels.light_forward(x, history, coefficients, residual=True),
        *kernels.light_sums(grad, x, history, 9, shift=True),
        *kernels.light_backward(grad, coefficients, None, residual=True, history=True),
        kernels.sum_forward(x, weights, per_channel[0], [x, history]),
        sums,
        *gradients,
    ]


def gate_outcomes(path: str, device: torch.device) -> list[Tensor]:
    """What a path makes of the same small gate, forward and backward."""
    from mrla_mm.ops import fused

    x, pooled = (numbers(*shape, device=device, phase=0.0) for shape in ((2, 6, 3, 4), (2, 6)))
    query, key, value, history = ((1, 1, 5), (1, 1, 5), (6, 1, 3, 3), (6,))
    weights = LightWeights(*(numbers(*shape, device=device, phase=1.0) for shape in (query, key, value, history)))
    affine = Affine(*(numbers(size, device=device, phase=2.0) for size in (6, 6, 2)))
    gate, coefficients = fused.fold(path, x, Gate(pooled), weights, affine, heads=2, history=True)
    sums = MapSums(*(numbers(2, 6, *last, device=device, phase=3.0) for last in ((9,), (), ())))
    constant, by_weights, by_scale, by_offset = fused.unfold(path, x, gate, weights, affine, sums)
    slope, shift = (per_channel.expand(2, 6) for per_channel in coefficients[1:])
    return [gate.gate, coefficients.taps, slope, shift, constant, *by_weights, by_scale, by_offset]


@torch.compiler.assume_constant_result  # of a function, since Dynamo looks through what `cache` makes of one
def why_triton_fails(device: torch.device) -> str:
    """Reason why the kernels do not work on a device, or an empty string; tried once per process."""
    return try_triton(device)


@cache
def try_triton(device: torch.device) -> str:
    """Try the kernels, see `why_triton_fails`; warn if they fail."""
    from mrla_mm.ops import triton

    try:
        # A first step in mixed precision asks under its autocast, and a GPU's convolutions round to TF32: either would
        # round one side of the comparison.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            found = outcomes(triton, device) + gate_outcomes("triton", device)
            cpu = torch.device("cpu")
            wanted = outcomes(folded, cpu) + gate_outcomes("folded", cpu)
            pairs = zip(found, wanted, strict=True)
            wrong = not all(torch.allclose(ours.cpu(), plain, rtol=1e-3, atol=1e-3) for ours, plain in pairs)
    except Exception as error:  # whatever a compiler, a driver or Triton itself may raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        reason = "they compute wrong numbers" if wrong else ""
    if reason:
        warnings.warn(
            f"layer attention runs by its folded path on {device}, because its Triton kernels do not work there "
            f"({reason}). MRLA_OPS=folded chooses that path without this warning",
            stacklevel=2,
        )
    return reason
