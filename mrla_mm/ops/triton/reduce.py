"""Passes over maps that need no neighbours: pooling, the sum and ReLU, weighted sums over layers.

    pool                    read x
    add_relu                read c and the shortcut, write x, pool it on the way
    weighted_sum            read each value and x, write y
    weighted_sum_backward   read grad and each value, write each value's gradient

BLOCK_C channels by BLOCK_S positions form a tile, with the longer side along the dense dimension.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.triton.launch import PROGRAMS, launch, sample_stride, sum_spans

MAX_GRID = 65535  # programs that CUDA takes along the second and third side of a grid
MAX_VALUES = 8  # values that one launch reads; a deeper stage takes several launches, each adding to the last's result


@triton.jit
def tile_offsets(sample, channels, pixels, C, S, stride_c, stride_s):
    """Element offsets of a tile of channels by positions in a map, and which of them exist."""
    inside = (channels[:, None] < C) & (pixels[None, :] < S)
    return sample * C * S + channels[:, None] * stride_c + pixels[None, :] * stride_s, inside


@triton.jit
def pool_kernel(x_ptr, out_ptr, B, C, S, stride_c, stride_s, span, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum over a span of the grid, divided by the positions of all of it."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        offsets, inside = tile_offsets(sample, channels, start + tl.arange(0, BLOCK_S), C, S, stride_c, stride_s)
        total += tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    place = (tl.program_id(2) * B + sample) * C + channels
    tl.store(out_ptr + place, tl.sum(total, axis=1) / S, mask=channels < C)


@triton.jit
def add_relu_kernel(
    c_ptr, shortcut_ptr, out_ptr, pooled_ptr, B, C, S, stride_c, stride_s, span,
    POOL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute out = relu(c + shortcut) and, POOL: its mean over the grid, of the rounded values."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        offsets, inside = tile_offsets(sample, channels, start + tl.arange(0, BLOCK_S), C, S, stride_c, stride_s)
        value = tl.load(c_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(shortcut_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = tl.where(value < 0, 0.0, value).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, rounded, mask=inside)
        if POOL:
            total += rounded.to(tl.float32)
    if POOL:
        place = (tl.program_id(2) * B + sample) * C + channels
        tl.store(pooled_ptr + place, tl.sum(total, axis=1) / S, mask=channels < C)


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
def weighted_sum_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, start_ptr, x_ptr, weights_ptr, shift_ptr, out_ptr,
    C, S, T, first, stride_c, stride_s, shift_stride,
    COUNT: tl.constexpr, START: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute out = [start +] sum_s weights_s v_s [+ shift] [+ x] over COUNT of the T values, from `first` on."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pixels = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)
    offsets, inside = tile_offsets(sample, channels, pixels, C, S, stride_c, stride_s)
    exists = channels < C
    total = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    if START:
        total += tl.load(start_ptr + offsets, mask=inside, other=0.0)
    for index in tl.static_range(COUNT):
        weight = tl.load(weights_ptr + (sample * C + channels) * T + first + index, mask=exists, other=0.0)
        value = tl.load(pick(index, v0, v1, v2, v3, v4, v5, v6, v7) + offsets, mask=inside, other=0.0)
        total += weight[:, None] * value.to(tl.float32)
    if SHIFT:
        total += tl.load(shift_ptr + sample * shift_stride + channels, mask=exists, other=0.0)[:, None]
    if RESIDUAL:
        total += tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_backward_kernel(
    grad_ptr, v0, v1, v2, v3, v4, v5, v6, v7, g0, g1, g2, g3, g4, g5, g6, g7, weights_ptr, sums_ptr,
    B, C, S, T, first, stride_c, stride_s, span, COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Gradient of each value, weights_s grad, and the sum over a span of the grid of grad times the value."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channels < C
    lanes = tl.arange(0, 8)
    total = tl.zeros((BLOCK_C, 8), dtype=tl.float32)
    place = (sample * C + channels) * T + first
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        pixels = start + tl.arange(0, BLOCK_S)
        offsets, inside = tile_offsets(sample, channels, pixels, C, S, stride_c, stride_s)
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        for index in tl.static_range(COUNT):
            value = tl.load(pick(index, v0, v1, v2, v3, v4, v5, v6, v7) + offsets, mask=inside, other=0.0)
            dot = tl.sum(grad * value.to(tl.float32), axis=1)
            total += tl.where(lanes[None, :] == index, dot[:, None], 0.0)
            weight = tl.load(weights_ptr + place + index, mask=exists, other=0.0)
            target = pick(index, g0, g1, g2, g3, g4, g5, g6, g7)
            tl.store(target + offsets, (weight[:, None] * grad).to(target.dtype.element_ty), mask=inside)
    place += tl.program_id(2) * B * C * T
    tl.store(sums_ptr + place[:, None] + lanes[None, :], total, mask=exists[:, None] & (lanes[None, :] < COUNT))


def tiling(x: Tensor) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Tile sides and launch grid for a map, its positions spread over programs."""
    batch, channels, height, width = x.shape
    pixels = height * width
    if x.is_contiguous():
        block_s = min(512, triton.next_power_of_2(pixels))
        block_c = max(1, min(2048 // block_s, triton.next_power_of_2(channels), 16))
    else:
        block_c = min(64, triton.next_power_of_2(channels))
        block_s = min(32, triton.next_power_of_2(pixels))
    while triton.cdiv(pixels, block_s) > MAX_GRID:
        block_s *= 2
    grid = (batch, triton.cdiv(channels, block_c), triton.cdiv(pixels, block_s))
    return dict(BLOCK_C=block_c, BLOCK_S=block_s), grid


def span_tiling(x: Tensor) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Tile sides, span and launch grid for sums over the grid: a program sums a span, and few maps take many spans."""
    blocks, (batch, rows, tiles) = tiling(x)
    per_program = max(1, tiles * batch * rows // PROGRAMS)
    spans = triton.cdiv(tiles, per_program)
    return dict(span=per_program * blocks["BLOCK_S"], **blocks), (batch, rows, spans)


def strides(x: Tensor) -> tuple[int, int]:
    """Distance in memory between channels and between positions of a dense map."""
    return (x.shape[2] * x.shape[3], 1) if x.is_contiguous() else (1, x.shape[1])


def pool(x: Tensor) -> Tensor:
    """Average over the grid in single precision: (B, C, H, W) -> (B, C)."""
    blocks, grid = span_tiling(x)
    out = torch.empty(grid[2], *x.shape[:2], dtype=torch.float32, device=x.device)
    launch(pool_kernel, grid, x, out, *x.shape[:2], x.shape[2] * x.shape[3], *strides(x), **blocks)
    return sum_spans(out)


def add_relu(c: Tensor, shortcut: Tensor, *, out: Tensor, pool: bool) -> Tensor | None:
    """See `cpu.add_relu`."""
    blocks, grid = span_tiling(c)
    averages = torch.empty(grid[2], *c.shape[:2], dtype=torch.float32, device=c.device) if pool else None
    launch(
        add_relu_kernel, grid,
        c, shortcut, out, out if averages is None else averages, *c.shape[:2], c.shape[2] * c.shape[3], *strides(c),
        POOL=pool, **blocks,
    )  # fmt: skip
    return None if averages is None else sum_spans(averages)


def weighted_sum(
    x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor], *, out: Tensor
) -> None:
    """See `cpu.weighted_sum`; partial sums of deep stages are in float32."""
    (blocks, grid), total = tiling(out), None
    for first in range(0, len(values), MAX_VALUES):
        part = values[first : first + MAX_VALUES]
        last = first + MAX_VALUES >= len(values)
        target = out if last else torch.empty_like(out, dtype=torch.float32)
        add_x, add_shift = last and x is not None, last and shift is not None
        launch(
            weighted_sum_kernel, grid,
            *part, *[out] * (MAX_VALUES - len(part)), out if total is None else total, x if add_x else out,
            weights, shift if add_shift else weights, target, out.shape[1], out.shape[2] * out.shape[3], len(values),
            first, *strides(out), sample_stride(shift) if add_shift else 0,
            COUNT=len(part), START=total is not None, RESIDUAL=add_x, SHIFT=add_shift, **blocks,
        )  # fmt: skip
        total = target


def weighted_sum_backward(grad: Tensor, weights: Tensor, values: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """See `cpu.weighted_sum_backward`."""
    blocks, grid = span_tiling(grad)
    sums = torch.empty(grid[2], *weights.shape, dtype=weights.dtype, device=weights.device)
    for first in range(0, len(values), MAX_VALUES):
        part, targets = values[first : first + MAX_VALUES], grads[first : first + MAX_VALUES]
        missing = MAX_VALUES - len(part)
        launch(
            weighted_sum_backward_kernel, grid,
            grad, *part, *[grad] * missing, *targets, *[targets[0]] * missing, weights, sums, *grad.shape[:2],
            grad.shape[2] * grad.shape[3], len(values), first, *strides(grad), COUNT=len(part), **blocks,
        )  # fmt: skip
    return sum_spans(sums)
