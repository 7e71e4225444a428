"""The folded maps' functions as operators of torch.library, so that torch.compile calls them without a graph break.

torch.compile sees them as opaque: it neither unrolls the loop over the batch nor allocates what the loop avoids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrla_mm.ops import folded
from mrla_mm.ops.folded import pool
from mrla_mm.ops.gating import Coefficients, MapSums

__all__ = ["light_backward", "light_forward", "light_sums", "pool", "sum_backward", "sum_forward"]

# Of the operators here and of Triton's; torch 2.6 cannot infer them from annotations such as list[Tensor].
SCHEMAS = {
    "light_forward": "(Tensor x, Tensor? previous, Tensor taps, Tensor? slope, Tensor? shift, bool residual) -> Tensor",
    "light_sums": "(Tensor grad, Tensor x, Tensor? previous, SymInt size, bool shift) -> Tensor[]",
    "light_backward": "(Tensor grad, Tensor taps, Tensor? slope, Tensor? constant, bool residual) -> Tensor[]",
    "masked_backward": (
        "(Tensor grad, Tensor taps, Tensor? slope, Tensor? constant, Tensor? mask, bool residual) -> Tensor[]"
    ),
    "sum_forward": "(Tensor? x, Tensor weights, Tensor? shift, Tensor[] values) -> Tensor",
    "sum_backward": "(Tensor grad, Tensor weights, Tensor[] values) -> Tensor[]",
}


def register(function, schema: str):
    """Register an operator, or leave the function as it is where torch (< 2.4) cannot."""
    if not hasattr(torch.library, "custom_op"):
        return function
    return torch.library.custom_op(f"mrla_mm::{function.__name__}", function, mutates_args=(), schema=schema)


def shaped_like(operator, fake) -> None:
    """Tell torch.compile the shapes an operator returns."""
    if hasattr(operator, "register_fake"):
        operator.register_fake(fake)


def folded_light_forward(
    x: Tensor, previous: Tensor | None, taps: Tensor, slope: Tensor | None, shift: Tensor | None, residual: bool
) -> Tensor:
    """`folded.light_forward`."""
    return folded.light_forward(x, previous, Coefficients(taps, slope, shift), residual=residual)


def folded_light_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, shift: bool) -> list[Tensor]:
    """`folded.light_sums`, without what is absent."""
    return [s for s in folded.light_sums(grad, x, previous, size, shift=shift) if s is not None]


def folded_light_backward(
    grad: Tensor, taps: Tensor, slope: Tensor | None, constant: Tensor | None, residual: bool
) -> list[Tensor]:
    """`folded.light_backward`, without what is absent."""
    coefficients = Coefficients(taps, slope, None)
    found = folded.light_backward(grad, coefficients, constant, residual=residual, history=slope is not None)
    return [g for g in found if g is not None]


def folded_sum_forward(x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor]) -> Tensor:
    """`folded.sum_forward`."""
    return folded.sum_forward(x, weights, shift, values)


def folded_sum_backward(grad: Tensor, weights: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """`folded.sum_backward`, the sums first."""
    sums, gradients = folded.sum_backward(grad, weights, values)
    return [sums, *gradients]


LIGHT_FORWARD = register(folded_light_forward, SCHEMAS["light_forward"])
LIGHT_SUMS = register(folded_light_sums, SCHEMAS["light_sums"])
LIGHT_BACKWARD = register(folded_light_backward, SCHEMAS["light_backward"])
SUM_FORWARD = register(folded_sum_forward, SCHEMAS["sum_forward"])
SUM_BACKWARD = register(folded_sum_backward, SCHEMAS["sum_backward"])


def fake_light_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, shift: bool) -> list[Tensor]:
    """Shapes of `folded_light_sums`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    per_channel = [x.new_empty(x.shape[:2], dtype=dtype) for _ in range((previous is not None) + shift)]
    return [x.new_empty(*x.shape[:2], size, dtype=dtype), *per_channel]


shaped_like(LIGHT_FORWARD, lambda x, *rest: torch.empty_like(x))
shaped_like(LIGHT_SUMS, fake_light_sums)
shaped_like(
    LIGHT_BACKWARD,
    lambda grad, taps, slope, *rest: [torch.empty_like(grad) for _ in range(1 if slope is None else 2)],
)
shaped_like(SUM_FORWARD, lambda x, weights, shift, values: torch.empty_like(values[0]))
shaped_like(
    SUM_BACKWARD,
    lambda grad, weights, values: [torch.empty_like(weights), *(torch.empty_like(value) for value in values)],
)


def light_forward(x: Tensor, previous: Tensor | None, coefficients: Coefficients, *, residual: bool) -> Tensor:
    """`folded.light_forward` as an operator."""
    return LIGHT_FORWARD(x, previous, *coefficients, residual)


def light_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, *, shift: bool) -> MapSums:
    """`folded.light_sums` as an operator."""
    found = LIGHT_SUMS(grad, x, previous, size, shift)
    return MapSums(found[0], None if previous is None else found[1], found[-1] if shift else None)


def light_backward(
    grad: Tensor, coefficients: Coefficients, constant: Tensor | None, *, residual: bool, history: bool
) -> tuple[Tensor, Tensor | None]:
    """`folded.light_backward` as an operator."""
    slope = coefficients.slope if history else None
    found = LIGHT_BACKWARD(grad, coefficients.taps, slope, constant, residual)
    return found[0], found[1] if history else None


def sum_forward(x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor]) -> Tensor:
    """`folded.sum_forward` as an operator."""
    return SUM_FORWARD(x, weights, shift, list(values))


def sum_backward(grad: Tensor, weights: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`folded.sum_backward` as an operator."""
    sums, *gradients = SUM_BACKWARD(grad, weights, list(values))
    return sums, gradients
