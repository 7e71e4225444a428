"""Passes over maps with a depthwise 3x3 convolution: two kernels that walk down the rows of a map.

    apply            read x and the history, write y
    grid_sums        read grad, x and the history
    apply_backward   read grad, write the gradients of x and the history; through a ReLU also read x

A program takes a tile of channels by columns and a span of rows. Each row is loaded once, shifted by -1, 0 and 1
columns, and what the next rows need of it stays in registers: three loads an element in place of nine, and no division
to find an element's place. Contiguous and channels-last (LAST) maps are read as they lie. W is passed as units of UNIT
columns, which tells the compiler how many elements of a row it may load at a time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.coefficients import Coefficients, GridSums
from mrla_mm.ops.triton.launch import PROGRAMS, launch, sample_stride, sum_spans

SHORTEST = 8  # rows of a span at least: each span loads two more
TILE = 512  # elements of a tile, four to a thread


@triton.jit
def tile_of(C, H, W, tiles, rows, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr):
    """Place of a program's tile.

    Returns:
        Its channels and which of them exist; which of its elements are in the map, have a left, and a right neighbour;
        their offsets in the sample's first row; the sample, its offset; the first row, and the one after the last.
    """
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    columns = tl.program_id(2) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    exists = channels < C
    inside = exists[:, None] & (columns < W)[None, :]
    left = exists[:, None] & ((columns > 0) & (columns <= W))[None, :]
    right = exists[:, None] & (columns + 1 < W)[None, :]
    offsets = channels[:, None] + columns[None, :] * C if LAST else channels[:, None] * (H * W) + columns[None, :]
    sample = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(2) // tiles * rows
    return (
        channels,
        exists,
        inside,
        left,
        right,
        offsets,
        sample,
        sample * C * H * W,
        begin,
        tl.minimum(begin + rows, H),
    )


@triton.jit
def load(pointers, inside, row, first, last):
    """Elements of one row in float32, 0 where not inside and if the row is not from first to before last."""
    return tl.load(pointers, mask=inside & (row >= first) & (row < last), other=0.0).to(tl.float32)


@triton.jit
def load_shifted(pointers, step, left, inside, right, row, H):
    """One row of the map as it is seen from the columns right of, at and left of each element."""
    return (
        load(pointers - step, left, row, 0, H),
        load(pointers, inside, row, 0, H),
        load(pointers + step, right, row, 0, H),
    )


@triton.jit
def load_weight(taps, exists, tap: tl.constexpr, FLIP: tl.constexpr):
    """Weight of one of nine taps by channel, in the transposed convolution that of the opposite one."""
    return tl.load(taps + (8 - tap if FLIP else tap), mask=exists, other=0.0)[:, None]


@triton.jit
def apply_kernel(
    x_ptr, history_ptr, taps_ptr, slope_ptr, shift_ptr, mask_ptr, out_ptr, grad_history_ptr,
    C, H, units, slope_stride, shift_stride, tiles, rows,
    TAPS: tl.constexpr, FLIP: tl.constexpr, RESIDUAL: tl.constexpr, HISTORY: tl.constexpr, SHIFT: tl.constexpr,
    SCALED: tl.constexpr, MASK: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute out = [x +] dw(x; taps) [+ slope history] [+ shift]; SCALED: also grad_history = slope x.

    MASK: out is 0 where the mask is not positive, and grad_history gets it added.
    """
    W = units * UNIT
    step = C if LAST else 1
    row_stride = W * step
    channels, exists, inside, left, right, offsets, sample, start, begin, end = tile_of(
        C, H, W, tiles, rows, LAST, BLOCK_C, BLOCK_W
    )
    x, history, mask, out, grad_history = (
        x_ptr + start, history_ptr + start, mask_ptr + start, out_ptr + start, grad_history_ptr + start
    )  # fmt: skip
    taps = taps_ptr + (sample * C + channels) * TAPS
    w4 = tl.load(taps + TAPS // 2, mask=exists, other=0.0)[:, None]
    if RESIDUAL:  # the sum is in float32, where 1 swallows nothing
        w4 += 1.0
    if TAPS == 9:
        w0 = load_weight(taps, exists, 0, FLIP)
        w1 = load_weight(taps, exists, 1, FLIP)
        w2 = load_weight(taps, exists, 2, FLIP)
        w3 = load_weight(taps, exists, 3, FLIP)
        w5 = load_weight(taps, exists, 5, FLIP)
        w6 = load_weight(taps, exists, 6, FLIP)
        w7 = load_weight(taps, exists, 7, FLIP)
        w8 = load_weight(taps, exists, 8, FLIP)
        pointers = x + (offsets + (begin - 1) * row_stride)
        above_left, above, above_right = load_shifted(pointers, step, left, inside, right, begin - 1, H)
        pointers = x + (offsets + begin * row_stride)
        at_left, at, at_right = load_shifted(pointers, step, left, inside, right, begin, H)
    if HISTORY or SCALED:
        slope = tl.load(slope_ptr + sample * slope_stride + channels, mask=exists, other=0.0)[:, None]
    total = tl.zeros((BLOCK_C, BLOCK_W), dtype=tl.float32)
    if SHIFT:
        total += tl.load(shift_ptr + sample * shift_stride + channels, mask=exists, other=0.0)[:, None]
    shift = total
    for row in range(begin, end):
        place = offsets + row * row_stride
        if TAPS == 9:
            pointers = x + (place + row_stride)
            below_left, below, below_right = load_shifted(pointers, step, left, inside, right, row + 1, H)
            total = shift + w0 * above_left
            total += w1 * above
            total += w2 * above_right
            total += w3 * at_left
            total += w4 * at
            total += w5 * at_right
            total += w6 * below_left
            total += w7 * below
            total += w8 * below_right
            centre = at
            above_left = at_left
            above = at
            above_right = at_right
            at_left = below_left
            at = below
            at_right = below_right
        else:
            centre = load(x + place, inside, row, begin, end)
            total = shift + w4 * centre
        if HISTORY:
            total += slope * load(history + place, inside, row, begin, end)
        if MASK:
            total = tl.where(load(mask + place, inside, row, begin, end) > 0, total, 0.0)
        tl.store(out + place, total.to(out_ptr.dtype.element_ty), mask=inside)
        if SCALED:
            scaled = slope * centre + total if MASK else slope * centre
            tl.store(grad_history + place, scaled.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(
    grad_ptr, x_ptr, history_ptr, grad_taps_ptr, grad_slope_ptr, grad_shift_ptr,
    B, C, H, units, tiles, rows,
    TAPS: tl.constexpr, HISTORY: tl.constexpr, SHIFT: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Sums over a program's rows and columns of grad times shifted x, of grad times history and of grad."""
    W = units * UNIT
    step = C if LAST else 1
    row_stride = W * step
    channels, exists, inside, left, right, offsets, sample, start, begin, end = tile_of(
        C, H, W, tiles, rows, LAST, BLOCK_C, BLOCK_W
    )
    x, grad, history = x_ptr + start, grad_ptr + start, history_ptr + start
    zero = tl.zeros((BLOCK_C, BLOCK_W), dtype=tl.float32)
    s4, grad_slope, grad_shift = zero, zero, zero
    if TAPS == 9:
        s0, s1, s2, s3, s5, s6, s7, s8 = zero, zero, zero, zero, zero, zero, zero, zero
        above, at = zero, zero
        for row in range(begin - 1, end + 1):  # of x, beside the rows of grad above, at and below it
            place = offsets + row * row_stride
            below = load(grad + (place + row_stride), inside, row + 1, begin, end)
            x_left, x_at, x_right = load_shifted(x + place, step, left, inside, right, row, H)
            s0 += below * x_left
            s1 += below * x_at
            s2 += below * x_right
            s3 += at * x_left
            s4 += at * x_at
            s5 += at * x_right
            s6 += above * x_left
            s7 += above * x_at
            s8 += above * x_right
            if HISTORY:
                grad_slope += at * load(history + place, inside, row, begin, end)
            if SHIFT:
                grad_shift += at
            above = at
            at = below
    else:
        for row in range(begin, end):
            place = offsets + row * row_stride
            at = load(grad + place, inside, row, begin, end)
            s4 += at * load(x + place, inside, row, begin, end)
            if HISTORY:
                grad_slope += at * load(history + place, inside, row, begin, end)
            if SHIFT:
                grad_shift += at
    place = (tl.program_id(2) * B + sample) * C + channels
    grad_taps = grad_taps_ptr + place * TAPS
    tl.store(grad_taps + TAPS // 2, tl.sum(s4, axis=1), mask=exists)
    if TAPS == 9:
        tl.store(grad_taps, tl.sum(s0, axis=1), mask=exists)
        tl.store(grad_taps + 1, tl.sum(s1, axis=1), mask=exists)
        tl.store(grad_taps + 2, tl.sum(s2, axis=1), mask=exists)
        tl.store(grad_taps + 3, tl.sum(s3, axis=1), mask=exists)
        tl.store(grad_taps + 5, tl.sum(s5, axis=1), mask=exists)
        tl.store(grad_taps + 6, tl.sum(s6, axis=1), mask=exists)
        tl.store(grad_taps + 7, tl.sum(s7, axis=1), mask=exists)
        tl.store(grad_taps + 8, tl.sum(s8, axis=1), mask=exists)
    if HISTORY:
        tl.store(grad_slope_ptr + place, tl.sum(grad_slope, axis=1), mask=exists)
    if SHIFT:
        tl.store(grad_shift_ptr + place, tl.sum(grad_shift, axis=1), mask=exists)


def row_tiling(x: Tensor) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Arguments of a launch that follow from a map's shape and layout, and its grid."""
    batch, channels, height, width = x.shape
    if x.is_contiguous():
        block_w = min(64, triton.next_power_of_2(width))
        block_c = min(TILE // block_w, triton.next_power_of_2(channels))
    else:
        block_c = min(64, triton.next_power_of_2(channels))
        block_w = min(TILE // block_c, triton.next_power_of_2(width))
    groups, tiles = triton.cdiv(channels, block_c), triton.cdiv(width, block_w)
    spans = max(1, PROGRAMS // (batch * groups * tiles))
    rows = min(height, max(SHORTEST, math.ceil(height / spans)))
    unit = math.gcd(width, 8)
    arguments = dict(units=width // unit, tiles=tiles, rows=rows, LAST=not x.is_contiguous(), UNIT=unit)
    return dict(arguments, BLOCK_C=block_c, BLOCK_W=block_w), (batch, groups, tiles * triton.cdiv(height, rows))


def apply(x: Tensor, history: Tensor | None, coefficients: Coefficients, *, residual: bool, out: Tensor) -> None:
    """See `cpu.apply`."""
    (taps, slope, shift), (blocks, grid) = coefficients, row_tiling(x)
    launch(
        apply_kernel, grid,
        x, x if history is None else history, taps, taps if slope is None else slope,
        taps if shift is None else shift, x, out, out, *x.shape[1:3],
        slope_stride=sample_stride(slope), shift_stride=sample_stride(shift),
        TAPS=taps.shape[-1], FLIP=False, RESIDUAL=residual, HISTORY=history is not None, SHIFT=shift is not None,
        SCALED=False, MASK=False, **blocks,
    )  # fmt: skip


def grid_sums(grad: Tensor, x: Tensor, history: Tensor | None, size: int, *, shift: bool) -> GridSums:
    """See `cpu.grid_sums`."""
    (blocks, grid), has_history = row_tiling(x), history is not None
    grad_taps = torch.empty(grid[2], *x.shape[:2], size, dtype=torch.float32, device=x.device)
    grad_slope, grad_shift = (
        torch.empty(grad_taps.shape[:3], dtype=torch.float32, device=x.device) if there else grad_taps
        for there in (has_history, shift)
    )
    launch(
        sums_kernel, grid,
        grad, x, history if has_history else x, grad_taps, grad_slope, grad_shift, *x.shape[:3],
        TAPS=size, HISTORY=has_history, SHIFT=shift, **blocks,
    )  # fmt: skip
    return GridSums(
        sum_spans(grad_taps), sum_spans(grad_slope) if has_history else None, sum_spans(grad_shift) if shift else None
    )


def apply_backward(
    grad: Tensor,
    coefficients: Coefficients,
    *,
    residual: bool,
    grad_x: Tensor,
    grad_history: Tensor | None = None,
    positive: Tensor | None = None,
) -> None:
    """See `cpu.apply_backward`."""
    (taps, slope, shift), (blocks, grid), scaled = coefficients, row_tiling(grad), grad_history is not None
    launch(
        apply_kernel, grid,
        grad, grad, taps, slope if scaled else taps, taps if shift is None else shift,
        grad if positive is None else positive, grad_x, grad_history if scaled else grad_x, *grad.shape[1:3],
        slope_stride=sample_stride(slope), shift_stride=sample_stride(shift),
        TAPS=taps.shape[-1], FLIP=True, RESIDUAL=residual, HISTORY=False, SHIFT=shift is not None,
        SCALED=scaled, MASK=positive is not None, **blocks,
    )  # fmt: skip
