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

from mrla_mm.ops.coefficients import (  # noqa: F401  four belong to the passes' interface
    GridSums,
    State,
    base_backward,
    base_state,
    expand_scores,
    light_backward,
    light_state,
)
from mrla_mm.ops.reference import at_least_float32, global_average

CHUNK_BYTES = 13 * 2**20  # of one map: several maps of this size fit the last-level cache of a CPU
# Where the residual may be a weight of 1, which swallows small weights in half precision.
EXACT = (torch.float32, torch.float64)


def chunks(x: Tensor) -> Iterator[slice | None]:
    """Slices of the batch whose maps fit the cache of a CPU; None for all of it, as elsewhere.

    Channels-last maps cannot be seen as one map of b * c channels, so they go one by one.
    """
    batch = x.shape[0]
    size = batch
    if x.device.type == "cpu":
        count = math.ceil(x.numel() * x.element_size() / CHUNK_BYTES)
        size = math.ceil(batch / count) if x.is_contiguous() else 1
    if size == batch:
        yield None
        return
    for start in range(0, batch, size):
        yield slice(start, start + size)


def grid_sum(x: Tensor) -> Tensor:
    """Sum over the grid in at least single precision: (B, C, H, W) -> (B, C)."""
    return x.sum(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def on_grid(per_channel: Tensor, x: Tensor) -> Tensor:
    """Values per channel that multiply a map in its precision: (B, C) -> (B, C, 1, 1)."""
    return per_channel.to(x.dtype)[:, :, None, None]


def depthwise(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """Depthwise 3x3 convolution (or product) in which each sample has its own weights.

    Shapes: x (b, c, H, W), weight (b, c, 9 or 1), shift (b, c) or None -> (b, c, H, W).
    """
    batch, channels = x.shape[:2]
    if shift is not None:
        shift = shift.to(x.dtype).reshape(-1)
    if weight.shape[-1] == 1:
        out = x * on_grid(weight[..., 0], x)
        return out if shift is None else out.add_(shift.view(batch, channels, 1, 1))
    weight = weight.to(x.dtype).reshape(batch * channels, 1, 3, 3)
    stacked = x.reshape(1, batch * channels, *x.shape[2:])
    return F.conv2d(stacked, weight, shift, padding=1, groups=batch * channels).view(x.shape)


def add_relu(c: Tensor, shortcut: Tensor | None, *, out: Tensor, pool: bool) -> Tensor | None:
    """Write relu(c + shortcut) (B, C, H, W); return its average over the grid (B, C) if asked.

    Without a shortcut out is c itself.
    """
    if shortcut is not None:
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
    """[x +] gain dw(x; weight) + slope history + shift, all (B, C, H, W), into out or a new map."""
    kernel = x.new_ones(1, 1) if weight is None else weight.flatten(1)
    kernel = at_least_float32(kernel).expand(*x.shape[:2], -1)  # (B, C, 9 or 1)
    if state.gain is not None:
        kernel = state.gain.unsqueeze(-1) * kernel
    residual_in_kernel = residual and x.dtype in EXACT
    if residual_in_kernel:
        kernel = kernel.clone()
        kernel[..., kernel.shape[-1] // 2].add_(1)
    y = depthwise(x, kernel, state.shift)
    if history is not None and state.slope is not None:
        y = torch.addcmul(y, history, on_grid(state.slope, x), out=out)
    elif history is not None:
        y = torch.add(y, history, out=out)
    elif out is not None:
        y = out.copy_(y)
    return y.add_(x) if residual and not residual_in_kernel else y


def grid_sums(
    grad: Tensor, x: Tensor, history: Tensor | None, *, value: bool, shift: bool
) -> GridSums:
    """Sums that all gradients of weights follow from: of grad itself if `shift`; see `GridSums`.

    With `value` x is shifted to the nine places of a 3x3 kernel.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    of_history = None if history is None else grid_sum(grad.to(dtype) * history)
    of_grad = None
    if value:
        groups = x.shape[0] * x.shape[1]
        stacked = (1, groups, *x.shape[2:])
        kernel = x.new_empty(groups, 1, 3, 3)  # only its shape matters
        with_bias = shift and x.dtype in EXACT
        _, of_value, of_grad = torch.ops.aten.convolution_backward(
            grad.reshape(stacked), x.reshape(stacked), kernel,
            [groups], (1, 1), (1, 1), (1, 1), False, (0, 0), groups, (False, True, with_bias),
        )  # fmt: skip
        of_value = of_value.to(dtype).view(*x.shape[:2], 9)
        of_grad = of_grad.view(x.shape[:2]) if with_bias else None
    else:
        of_value = grid_sum(at_least_float32(grad) * x).unsqueeze(-1)
    if shift and of_grad is None:
        of_grad = grid_sum(grad)
    return GridSums(of_value, of_history, of_grad)


def apply_backward(
    grad: Tensor,
    weight: Tensor | None,
    state: State,
    *,
    residual: bool,
    grad_x: Tensor,
    grad_history: Tensor | None = None,
    positive: Tensor | None = None,
    added: Tensor | None = None,
) -> None:
    """Write the gradients of x and, if asked for, of the history: the transpose of `apply`.

    Args, all maps (B, C, H, W); others are those of `apply`:
        grad: gradient of what `apply` wrote.
        state: that of `apply`, but as shift what is added to every pixel of grad_x.
        grad_x: gradient of x, or with `positive` of c.
        grad_history: gradient of the history; with `positive`, where the history is the shortcut,
            also that of the sum.
        positive: x = relu(c + shortcut), through which the gradient goes on to c.
        added: what else is added to the gradient of x.
    """
    flipped = None if weight is None else weight.flip((2, 3))
    slope = torch.ones_like(grad[:1, :, :1, :1])
    if state.slope is not None:
        slope = on_grid(state.slope, grad)
    state = state._replace(slope=None)
    if positive is None:
        apply(grad, added, flipped, state, residual=residual, out=grad_x)
        if grad_history is not None:
            torch.mul(grad, slope, out=grad_history)
        return
    grad_sum = apply(grad, added, flipped, state, residual=residual)
    torch.ops.aten.threshold_backward.grad_input(grad_sum, positive, 0, grad_input=grad_x)
    if grad_history is not None:
        torch.addcmul(grad_x, grad, slope, out=grad_history)


def weighted_sum(x: Tensor | None, state: State, values: Sequence[Tensor], *, out: Tensor) -> None:
    """Write [x +] gain sum_s scores_s values_s [+ shift] (B, C, H, W), reading each value once."""
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
    batch, channels = grad.shape[:2]
    sums = state.scores.new_empty(batch, len(values) + 1, channels)
    products = torch.empty_like(grad)
    weights = value_weights(state, grad)
    for index, value in enumerate(values):
        sums[:, index] = grid_sum(torch.mul(grad, value, out=products))
        if fresh:
            torch.mul(grad, weights[index], out=grads[index])
        else:
            grads[index].addcmul_(grad, weights[index])
    if state.shift is not None:
        sums[:, -1] = grid_sum(grad)
    return sums


def take_shift(value_sums: Tensor, sums: GridSums) -> None:
    """Write the sum of grad that `grid_sums` found to where `weighted_sum_backward` leaves it."""
    value_sums[:, -1] = sums.grad
