"""The passes over feature maps of fused layer attention in plain PyTorch.

One depthwise convolution over B * C channels, with weights of each sample, does gate, value, norm
and residual; the history is one more operation. `light` and `base` call the passes for a few
samples at a time (`chunks`), which stay in the cache of a CPU from one pass to the next. The passes
write into the tensors they are given.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.coefficients import (  # noqa: F401  the first two belong to the passes' interface
    GridSums,
    State,
    attention_backward,
    attention_state,
    expand_scores,
)
from mrla_mm.ops.reference import at_least_float32, global_average

CHUNK_BYTES = 13 * 2**20  # of one map: several maps of this size fit the last-level cache of a CPU
EXACT = (
    torch.float32,
    torch.float64,
)  # in less precision a weight of 1 for the residual would swallow small weights


def chunks(x: Tensor) -> Iterator[slice | None]:
    """Slices of the batch whose maps fit the cache of a CPU; None for all of it, as elsewhere.

    Channels-last maps cannot be seen as one map of b * c channels, so they go one by one.
    """
    step = batch = x.shape[0]
    if x.device.type == "cpu":
        step = (
            math.ceil(batch / math.ceil(x.numel() * x.element_size() / CHUNK_BYTES))
            if x.is_contiguous()
            else 1
        )
    if step == batch:
        yield None
        return
    for start in range(0, batch, step):
        yield slice(start, start + step)


pool = global_average


def grid_sum(x: Tensor) -> Tensor:
    """Sum over the grid in at least single precision: (B, C, H, W) -> (B, C)."""
    return x.sum(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def on_grid(per_channel: Tensor, x: Tensor) -> Tensor:
    """Values per channel that multiply a map in its precision: (B, C) -> (B, C, 1, 1)."""
    return per_channel.to(x.dtype)[:, :, None, None]


def depthwise(x: Tensor, taps: Tensor, shift: Tensor | None) -> Tensor:
    """Depthwise 3x3 convolution (or product, with one tap) in which each sample has its own weights.

    Shapes:
        x (b, c, H, W), taps (b, c, 9 or 1), shift (b or 1, c) -> (b, c, H, W).
    """
    batch, channels = x.shape[:2]
    if shift is not None:
        shift = shift.to(x.dtype).expand(batch, channels).reshape(-1)
    if taps.shape[-1] == 1:
        out = x * on_grid(taps[..., 0], x)
        return out if shift is None else out.add_(shift.view(batch, channels, 1, 1))
    weight = taps.to(x.dtype).reshape(batch * channels, 1, 3, 3)
    stacked = x.reshape(1, batch * channels, *x.shape[2:])
    return F.conv2d(stacked, weight, shift, padding=1, groups=batch * channels).view(x.shape)


def add_relu(c: Tensor, shortcut: Tensor, *, out: Tensor, pool: bool) -> Tensor | None:
    """Write relu(c + shortcut) (B, C, H, W); return its average over the grid (B, C) if asked for."""
    torch.add(c, shortcut, out=out).relu_()
    return global_average(out) if pool else None


def apply(
    x: Tensor,
    history: Tensor | None,
    weight: Tensor | None,
    state: State,
    *,
    residual: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return [x +] gain dw(x; weight) + slope history + shift, all (B, C, H, W); written into out if it is given."""
    *_, gain, slope, shift = state
    taps = at_least_float32(
        x.new_ones(1, 1) if weight is None else weight.flatten(1)
    )  # (C or 1, 9 or 1)
    if gain is not None:
        taps = gain.unsqueeze(-1) * taps
    taps = taps.expand(*x.shape[:2], -1)
    in_taps = residual and x.dtype in EXACT
    if in_taps:
        taps = taps.clone()
        taps[..., taps.shape[-1] // 2].add_(1)
    part, last = depthwise(x, taps, shift), residual and not in_taps
    if history is not None and slope is not None:
        part = torch.addcmul(part, history, on_grid(slope, x), out=out)
    elif history is not None:
        part = torch.add(part, history, out=out)
    elif out is not None and not last:
        part = out.copy_(part)
    return torch.add(x, part, out=out) if last else part


def grid_sums(
    grad: Tensor, x: Tensor, history: Tensor | None, *, value: bool, shift: bool
) -> GridSums:
    """Sums over the grid that all gradients of weights follow from: 9 taps, or 1 without value; of grad if asked."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad_slope = None if history is None else grid_sum(grad.to(dtype) * history)
    if not value:
        taps = grid_sum(at_least_float32(grad) * x).unsqueeze(-1)
        return GridSums(taps, grad_slope, grid_sum(grad) if shift else None)
    groups, with_bias = x.shape[0] * x.shape[1], shift and x.dtype in EXACT
    stacked = (1, groups, *x.shape[2:])
    weight = x.new_empty(
        groups, 1, 3, 3
    )  # only its shape matters for the gradient of the weight and bias
    _, grad_taps, grad_shift = torch.ops.aten.convolution_backward(
        grad.reshape(stacked), x.reshape(stacked), weight,
        [groups], (1, 1), (1, 1), (1, 1), False, (0, 0), groups, (False, True, with_bias),
    )  # fmt: skip
    if shift:
        grad_shift = grad_shift.view(x.shape[:2]) if with_bias else grid_sum(grad)
    return GridSums(
        grad_taps.to(dtype).view(*x.shape[:2], 9), grad_slope, grad_shift if shift else None
    )


def apply_backward(
    grad: Tensor, weight: Tensor | None, state: State, *, residual: bool, grad_x: Tensor,
    grad_history: Tensor | None = None, positive: Tensor | None = None, added: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of x and, if asked for, of the history: the transpose of `apply`, all (B, C, H, W).

    Args:
        grad: gradient of what `apply` wrote.
        weight: that of `apply`.
        state: that of `apply`, but as shift what is added to every position of grad_x.
        residual: whether `apply` added x.
        grad_x: gradient of x, or with `positive` of c.
        grad_history: gradient of the history; with `positive`, where the history is the shortcut,
            also that of the sum.
        positive: x = relu(c + shortcut), through which the gradient goes on to c.
        added: what else is added to the gradient of x.
    """
    flipped, slope = None if weight is None else weight.flip((2, 3)), state.slope
    out = None if positive is not None else grad_x
    through = apply(grad, added, flipped, state._replace(slope=None), residual=residual, out=out)
    if positive is not None:
        torch.ops.aten.threshold_backward.grad_input(through, positive, 0, grad_input=grad_x)
    if grad_history is None:
        return
    slope = torch.ones_like(grad[:1, :, :1, :1]) if slope is None else on_grid(slope, grad)
    if positive is None:
        torch.mul(grad, slope, out=grad_history)
    else:
        torch.addcmul(grad_x, grad, slope, out=grad_history)


def weighted_sum(x: Tensor | None, state: State, values: Sequence[Tensor], *, out: Tensor) -> None:
    """Write [x +] gain sum_s scores_s values_s [+ shift], reading each value once: x, T values and out (B, C, H, W)."""
    weights = value_weights(state, out)
    first = x is not None and out.dtype in EXACT
    if first:
        torch.addcmul(x, values[0], weights[0], out=out)
    else:
        torch.mul(values[0], weights[0], out=out)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        out.addcmul_(value, weight)
    if state.shift is not None:
        out.add_(on_grid(state.shift, out))
    if x is not None and not first:
        out.add_(x)


def value_weights(state: State, x: Tensor) -> list[Tensor]:
    """Factor of each value in the precision of the maps, gain times score: T times (B, C, 1, 1)."""
    weights = expand_scores(state.scores, x.shape[1])  # (B, T, C)
    if state.gain is not None:
        weights = weights * state.gain.unsqueeze(1)
    return [on_grid(weight, x) for weight in weights.unbind(1)]


def weighted_sum_backward(
    grad: Tensor, state: State, values: Sequence[Tensor], grads: Sequence[Tensor], *, fresh: bool
) -> Tensor:
    """Add weights_s grad to the gradient of each value; return sums over the grid, (B, T + 1, C).

    They are of grad times each value and, last, where there is a norm, of grad. With `fresh` the
    gradients are written, whatever they were before.
    """
    sums = torch.empty(
        grad.shape[0], len(values) + 1, grad.shape[1], dtype=state.scores.dtype, device=grad.device
    )
    products = torch.empty_like(grad)
    for index, (value, weight, gradient) in enumerate(
        zip(values, value_weights(state, grad), grads, strict=True)
    ):
        sums[:, index] = grid_sum(torch.mul(grad, value, out=products))
        if fresh:
            torch.mul(grad, weight, out=gradient)
        else:
            gradient.addcmul_(grad, weight)
    if state.shift is not None:
        sums[:, -1] = grid_sum(grad)
    return sums
