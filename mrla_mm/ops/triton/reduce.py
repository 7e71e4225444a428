"""Passes over maps that need no neighbours: pooling, the sum and ReLU, weighted sums over layers.

    pool                    read x
    add_relu                read c and the shortcut, write x, pool it on the way
    weighted_sum            read each value and x, write y
    some_values_backward    read grad and each value, write each value's gradient

BLOCK_C channels by BLOCK_S positions form a tile, with the longer side along the dense dimension.
The S positions of a map are passed as units of UNIT, which tells the compiler how many elements it
may load at a time.
"""

import math
from functools import cache
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.triton.launch import SIZES, ceil_div, launch, next_power_of_2, programs

MAX_GRID = 65535  # programs that CUDA takes along the second and third side of a grid
MAX_VALUES = 8  # values that one launch reads; each launch after it adds to what the last wrote
VALUES = [f"v{index}" for index in range(MAX_VALUES)]  # as kernels call them
GRAD_VALUES = [f"g{index}" for index in range(MAX_VALUES)]


@triton.jit
def tile_elements(sample, channels, pixels, C, S, CHANNELS_LAST: tl.constexpr):
    """Element offsets of a tile of channels by positions in a map, and which of them exist."""
    inside = (channels[:, None] < C) & (pixels[None, :] < S)
    if CHANNELS_LAST:
        within = channels[:, None] + pixels[None, :] * C
    else:
        within = channels[:, None] * S + pixels[None, :]
    return sample * C * S + within, inside


@triton.jit(do_not_specialize=SIZES)
def add_relu_kernel(
    x_ptr, shortcut_ptr, out_ptr, averages_ptr, B, units,
    UNIT: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    C, span,
):  # fmt: skip
    """Sum of x over a span of the grid, divided by the positions of all of it.

    With a shortcut that of out = relu(x + shortcut), of the rounded values, which is stored;
    averages may be None.
    """
    S = units * UNIT
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        elements, inside = tile_elements(
            sample, channels, start + tl.arange(0, BLOCK_S), C, S, CHANNELS_LAST
        )
        value = tl.load(x_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        if shortcut_ptr is not None:
            value += tl.load(shortcut_ptr + elements, mask=inside, other=0.0).to(tl.float32)
            rounded = tl.where(value < 0, 0.0, value).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + elements, rounded, mask=inside)
            value = rounded.to(tl.float32)
        total += value
    if averages_ptr is not None:
        place = (tl.program_id(2) * B + sample) * C + channels
        tl.store(averages_ptr + place, tl.sum(total, axis=1) / S, mask=channels < C)


@triton.jit
def pick(index: tl.constexpr, p0, p1, p2, p3, p4, p5, p6, p7):
    """One of eight pointers, chosen while compiling."""
    if index == 0:  # noqa: SIM116  a kernel has no dictionaries
        return p0
    elif index == 1:
        return p1
    elif index == 2:
        return p2
    elif index == 3:
        return p3
    elif index == 4:
        return p4
    elif index == 5:
        return p5
    elif index == 6:
        return p6
    else:
        return p7


@triton.jit
def load_value_weight(scores_ptr, gain_ptr, sample, channels, exists, index, C, D, T):
    """Factor of one of T values by channel, gain times score: (BLOCK_C, 1)."""
    place = (sample * T + index) * (C // D) + channels // D
    weight = tl.load(scores_ptr + place, mask=exists, other=0.0)
    if gain_ptr is not None:
        weight *= tl.load(gain_ptr + sample * C + channels, mask=exists, other=0.0)
    return weight[:, None]


@triton.jit(do_not_specialize=SIZES)
def weighted_sum_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, partial_ptr, x_ptr, scores_ptr, gain_ptr, offset_ptr, out_ptr,
    units,
    UNIT: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    first, C, D, T, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute out = [partial +] gain sum_s scores_s v_s [+ offset] [+ x].

    The sum is over COUNT of the T values, from `first` on.
    """
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pixels = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)
    elements, inside = tile_elements(sample, channels, pixels, C, units * UNIT, CHANNELS_LAST)
    exists = channels < C
    total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    if partial_ptr is not None:
        total += tl.load(partial_ptr + elements, mask=inside, other=0.0)
    for index in tl.static_range(COUNT):
        s = first + index
        weight = load_value_weight(scores_ptr, gain_ptr, sample, channels, exists, s, C, D, T)
        source = pick(index, v0, v1, v2, v3, v4, v5, v6, v7)
        value = tl.load(source + elements, mask=inside, other=0.0)
        total += weight * value.to(tl.float32)
    if offset_ptr is not None:
        total += tl.load(offset_ptr + sample * C + channels, mask=exists, other=0.0)[:, None]
    if x_ptr is not None:
        total += tl.load(x_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + elements, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def some_values_backward_kernel(
    grad_ptr, v0, v1, v2, v3, v4, v5, v6, v7, scores_ptr, gain_ptr,
    g0, g1, g2, g3, g4, g5, g6, g7, sums_ptr, B, units,
    UNIT: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    first, C, D, T, COUNT: tl.constexpr, span,
):  # fmt: skip
    """Add weights_s grad to each value's gradient; sum grad times value, and grad, over a span."""
    S = units * UNIT
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channels < C
    lanes = tl.arange(0, 8)
    total = tl.zeros((BLOCK_C, 8), dtype=tl.float32)
    grad_total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        elements, inside = tile_elements(
            sample, channels, start + tl.arange(0, BLOCK_S), C, S, CHANNELS_LAST
        )
        grad = tl.load(grad_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        grad_total += grad
        for index in tl.static_range(COUNT):
            source = pick(index, v0, v1, v2, v3, v4, v5, v6, v7)
            value = tl.load(source + elements, mask=inside, other=0.0)
            dot = tl.sum(grad * value.to(tl.float32), axis=1)
            total += tl.where(lanes[None, :] == index, dot[:, None], 0.0)
            target = pick(index, g0, g1, g2, g3, g4, g5, g6, g7)
            s = first + index
            weight = load_value_weight(scores_ptr, gain_ptr, sample, channels, exists, s, C, D, T)
            grad_value = tl.load(target + elements, mask=inside, other=0.0).to(tl.float32)
            grad_value += weight * grad
            tl.store(target + elements, grad_value.to(target.dtype.element_ty), mask=inside)
    place = (tl.program_id(2) * B + sample) * (COUNT + 1) * C + channels
    planes = place[:, None] + lanes[None, :] * C
    tl.store(sums_ptr + planes, total, mask=exists[:, None] & (lanes[None, :] < COUNT))
    tl.store(sums_ptr + place + COUNT * C, tl.sum(grad_total, axis=1), mask=exists)


@cache
def tiling(shape: torch.Size, channels_last: bool) -> tuple[tuple, dict]:
    """Grid of a launch that shares a map out, and the arguments that say how."""
    batch, channels, pixels = shape[0], shape[1], shape[2] * shape[3]
    if channels_last:
        block_c = min(64, next_power_of_2(channels))
        block_s = min(32, next_power_of_2(pixels))
    else:
        block_s = min(512, next_power_of_2(pixels))
        block_c = max(1, min(2048 // block_s, next_power_of_2(channels), 16))
    while ceil_div(pixels, block_s) > MAX_GRID:
        block_s *= 2
    unit = math.gcd(pixels, 8)
    sides = dict(UNIT=unit, CHANNELS_LAST=channels_last, BLOCK_C=block_c, BLOCK_S=block_s)
    grid = (batch, ceil_div(channels, block_c), ceil_div(pixels, block_s))
    return grid, dict(units=pixels // unit, **sides)


@cache
def span_tiling(shape: torch.Size, channels_last: bool, count: int) -> tuple[tuple, dict, int]:
    """As `tiling`, and the span that a program sums: many tiles of a few maps, few of many."""
    (batch, groups, tiles), arguments = tiling(shape, channels_last)
    per_program = min(tiles, max(1, tiles * batch * groups // count))
    grid = batch, groups, ceil_div(tiles, per_program)
    return grid, dict(B=batch) | arguments, per_program * arguments["BLOCK_S"]


def compile_key(shape: torch.Size, channels_last: bool) -> tuple[int, ...]:
    """What of a map's shape these kernels are compiled for, and which loops go round twice."""
    (_, groups, tiles), arguments = tiling(shape, channels_last)
    blocks = arguments["UNIT"], arguments["BLOCK_C"], arguments["BLOCK_S"]
    return *blocks, min(2, groups), min(2, tiles)


def add_relu(c, shortcut, *, out, pool) -> Tensor | None:
    """See `Passes.add_relu`; a part for each span of the grid."""
    if shortcut is None and not pool:
        return None
    grid, tiles, span = span_tiling(c.shape, not c.is_contiguous(), programs(c.device))
    averages = None
    if pool:
        averages = torch.empty(grid[2], *c.shape[:2], dtype=torch.float32, device=c.device)
    outputs = dict(out_ptr=out, averages_ptr=averages)
    numbers = dict(tiles, C=c.shape[1], span=span)
    launch(add_relu_kernel, grid, dict(x_ptr=c, shortcut_ptr=shortcut), outputs, numbers)
    return averages


def weighted_sum(values, scores, *, gain=None, offset=None, x=None, out) -> None:
    """See `Passes.weighted_sum`; partial sums of deep stages are in float32."""
    grid, tiles = tiling(out.shape, not out.is_contiguous())
    _, depth, heads = scores.shape
    total = None
    for first in range(0, depth, MAX_VALUES):
        some = values[first : first + MAX_VALUES]
        is_end = first + MAX_VALUES >= depth
        target = out if is_end else torch.empty_like(out, dtype=torch.float32)
        inputs = dict(
            zip_longest(VALUES, some), partial_ptr=total, x_ptr=x if is_end else None,
            scores_ptr=scores, gain_ptr=gain, offset_ptr=offset if is_end else None,
        )  # fmt: skip
        dims = dict(first=first, C=out.shape[1], D=out.shape[1] // heads, T=depth, COUNT=len(some))
        launch(weighted_sum_kernel, grid, inputs, dict(out_ptr=target), tiles | dims)
        total = target


def some_values_backward(grad, values, scores, *, gain=None, grad_values, first=0) -> Tensor:
    """See `Passes.weighted_sum_backward`; a part for each span of the grid, always with grad's sum.

    These are at most MAX_VALUES of the T values, from `first` on.
    """
    grid, tiles, span = span_tiling(grad.shape, not grad.is_contiguous(), programs(grad.device))
    batch, channels = grad.shape[:2]
    _, depth, heads = scores.shape
    count = len(values)
    sums = torch.empty(grid[2], batch, count + 1, channels, dtype=torch.float32, device=grad.device)
    inputs = dict(zip_longest(VALUES, values), scores_ptr=scores, gain_ptr=gain)
    outputs = dict(zip_longest(GRAD_VALUES, grad_values), sums_ptr=sums)
    dims = dict(first=first, C=channels, D=channels // heads, T=depth, COUNT=count, span=span)
    launch(some_values_backward_kernel, grid, dict(grad_ptr=grad) | inputs, outputs, tiles | dims)
    return sums
