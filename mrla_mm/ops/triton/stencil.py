"""Passes over maps with a depthwise 3x3 convolution: two kernels that walk down the rows of a map.

    convolve            read x and the history, write y
    grid_sums           read grad, x and the history
    convolve_backward   read grad and, for a ReLU, x; write the gradients of x and the history

A program takes a tile of channels by columns and a span of rows. Each row is loaded once, and what
the next rows need of it stays in registers. So does what a thread needs of its own columns: it
loads UNIT of them at a time, and one element on either side. Of channels-last maps, whose threads
load channels, UNIT is 1, and a row is loaded three times, shifted by -1, 0 and 1 columns. No load
passes a store, so a row is loaded before the one above it is stored. W is passed as units of UNIT
columns, which tells the compiler that they may be loaded together.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.triton.gate import PendingGradients, finish_gradients, load_or
from mrla_mm.ops.triton.launch import SIZES, ceil_div, launch, next_power_of_2, programs

SHORTEST = 8  # rows of a span at least: each span loads two more
THREADS = 128  # of a program
TILE = 4 * THREADS  # elements of a tile
NOTHING_PENDING = PendingGradients()


@triton.jit
def tile_and_span(tiles, rows, H, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr):
    """Channels and columns of a program's tile; its rows, which go from begin to before end."""
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    columns = tl.program_id(2) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    begin = tl.program_id(2) // tiles * rows
    return channels, columns, begin, tl.minimum(begin + rows, H)


@triton.jit
def strides_of(C, H, W, CHANNELS_LAST: tl.constexpr):
    """Elements from a channel, row and column of a map to the next."""
    if CHANNELS_LAST:
        return 1, W * C, C
    else:
        return H * W, W, 1


@triton.jit
def sides_of(inside, columns, W, UNIT: tl.constexpr):
    """Which elements inside the map have a left and which a right neighbour in another unit."""
    left = inside & ((columns > 0) & (columns % UNIT == 0))[None, :]
    right = inside & ((columns + 1 < W) & (columns % UNIT == UNIT - 1))[None, :]
    return left, right


@triton.jit
def load_within(pointers, inside, row, first, last):
    """Elements of one row, 0 where not inside and if the row is not from first to before last."""
    mask = (inside & (row >= first) & (row < last)) != 0  # Triton 3.9 interprets & as an integer
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_row(pointers, step, left, inside, right, row, H):
    """One row of the map, and beside it the neighbours of each element in other units, else 0."""
    return (
        load_within(pointers - step, left, row, 0, H),
        load_within(pointers, inside, row, 0, H),
        load_within(pointers + step, right, row, 0, H),
    )


@triton.jit
def neighbours(left, at, right, UNIT: tl.constexpr):
    """What `load_row` returns in float32, with the neighbours in the same unit too."""
    left = left.to(tl.float32)
    at = at.to(tl.float32)
    right = right.to(tl.float32)
    place = tl.arange(0, at.shape[1])[None, :] % UNIT
    if UNIT == 2:
        first, second = tl.split(tl.reshape(at, (at.shape[0], at.shape[1] // 2, 2)))
        swapped = tl.reshape(tl.join(second, first), at.shape)
        left = tl.where(place == 0, left, swapped)
        right = tl.where(place == 1, right, swapped)
    if UNIT == 4:
        even, odd = tl.split(tl.reshape(at, (at.shape[0], at.shape[1] // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        before = tl.join(tl.join(fourth, second), tl.join(first, third))  # 4, 1, 2, 3
        after = tl.join(tl.join(second, fourth), tl.join(third, first))  # 2, 3, 4, 1
        left = tl.where(place == 0, left, tl.reshape(before, at.shape))
        right = tl.where(place == 3, right, tl.reshape(after, at.shape))
    return left, at, right


@triton.jit
def load_weight(weight_ptr, gain, channels, exists, tap: tl.constexpr, FLIP: tl.constexpr):
    """Weight of one of nine taps by channel, in the transposed convolution of the opposite one."""
    places = channels * 9 + (8 - tap if FLIP else tap)
    return (gain * load_or(weight_ptr, places, exists, 1.0))[:, None]


@triton.jit(do_not_specialize=SIZES)
def convolve_kernel(
    x_ptr, history_ptr, weight_ptr, gain_ptr, slope_ptr, offset_ptr, relu_output_ptr,
    grad_qk_ptr, query_weight_ptr, key_weight_ptr, grad_params_ptr, grad_qk_weights_ptr,
    out_ptr, grad_history_ptr, grad_params_sum_ptr, grad_qk_weights_sum_ptr,
    H, units, tiles, rows, CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
    heads, params_size, K: tl.constexpr, C, FLIP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute out = [x +] gain dw(x; weight) [+ slope history] [+ offset].

    If asked, also grad_history = slope x. With `relu_output`, out is 0 where that is 0 or less, not
    at NaN, and is added to grad_history. With grad_qk it finishes `PendingGradients` too.
    """
    W = units * UNIT
    channels, columns, begin, end = tile_and_span(tiles, rows, H, BLOCK_C, BLOCK_W)
    channel_stride, row_stride, step = strides_of(C, H, W, CHANNELS_LAST)
    first_row = channels[:, None] * channel_stride + columns[None, :] * step
    exists = channels < C
    inside = exists[:, None] & (columns < W)[None, :]
    left, right = sides_of(inside, columns, W, UNIT)
    sample = tl.program_id(0).to(tl.int64)
    start = sample * C * H * W
    of_sample = sample * C + channels
    offset = load_or(offset_ptr, of_sample, exists, 0.0)
    if grad_qk_ptr is not None:
        offset += finish_gradients(
            grad_qk_ptr, query_weight_ptr, key_weight_ptr, grad_params_ptr, grad_qk_weights_ptr,
            grad_params_sum_ptr, grad_qk_weights_sum_ptr, heads, params_size,
            channels, exists, C, H * W, K,
        )  # fmt: skip
    gain = load_or(gain_ptr, of_sample, exists, 1.0)
    w4 = load_weight(weight_ptr, gain, channels, exists, 4, FLIP)  # the gain without a weight
    if RESIDUAL:  # the sum is in float32, where 1 swallows nothing
        w4 += 1.0
    x, out = x_ptr + start, out_ptr + start
    elements = first_row + begin * row_stride
    if weight_ptr is not None:
        w0 = load_weight(weight_ptr, gain, channels, exists, 0, FLIP)
        w1 = load_weight(weight_ptr, gain, channels, exists, 1, FLIP)
        w2 = load_weight(weight_ptr, gain, channels, exists, 2, FLIP)
        w3 = load_weight(weight_ptr, gain, channels, exists, 3, FLIP)
        w5 = load_weight(weight_ptr, gain, channels, exists, 5, FLIP)
        w6 = load_weight(weight_ptr, gain, channels, exists, 6, FLIP)
        w7 = load_weight(weight_ptr, gain, channels, exists, 7, FLIP)
        w8 = load_weight(weight_ptr, gain, channels, exists, 8, FLIP)
        pointers = x + (elements - row_stride)
        next_left, next_at, next_right = load_row(pointers, step, left, inside, right, begin - 1, H)
        above_left, above, above_right = neighbours(next_left, next_at, next_right, UNIT)
        next_left, next_at, next_right = load_row(x + elements, step, left, inside, right, begin, H)
        at_left, at, at_right = neighbours(next_left, next_at, next_right, UNIT)
        pointers = x + (elements + row_stride)
        next_left, next_at, next_right = load_row(pointers, step, left, inside, right, begin + 1, H)
    slope = load_or(slope_ptr, of_sample, exists, 1.0)[:, None]
    offset = tl.zeros((BLOCK_C, BLOCK_W), dtype=tl.float32) + offset[:, None]
    if history_ptr is not None:
        history = load_within(history_ptr + start + elements, inside, begin, begin, end)
    if relu_output_ptr is not None:
        relu_output = load_within(relu_output_ptr + start + elements, inside, begin, begin, end)
    # Two rows a turn, so that none is moved between registers; one beyond the last is masked.
    for pair in range(begin, end, 2):
        for second in tl.static_range(2):
            row = pair + second
            elements = first_row + row * row_stride
            total = offset
            if relu_output_ptr is not None:
                is_blocked = relu_output <= 0
                relu_output = load_within(
                    relu_output_ptr + start + elements + row_stride, inside, row + 1, begin, end
                )
            if weight_ptr is not None:
                below_left, below, below_right = neighbours(next_left, next_at, next_right, UNIT)
                pointers = x + (elements + 2 * row_stride)
                next_left, next_at, next_right = load_row(
                    pointers, step, left, inside, right, row + 2, H
                )
                total += w0 * above_left
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
                centre = load_within(x + elements, inside, row, begin, end).to(tl.float32)
                total += w4 * centre
            if history_ptr is not None:
                total += slope * history.to(tl.float32)
                history = load_within(
                    history_ptr + start + elements + row_stride, inside, row + 1, begin, end
                )
            if relu_output_ptr is not None:
                total = tl.where(is_blocked, 0.0, total)
            exists_here = (inside & (row < end)) != 0
            tl.store(out + elements, total.to(out_ptr.dtype.element_ty), mask=exists_here)
            if grad_history_ptr is not None:
                scaled = slope * centre
                if relu_output_ptr is not None:
                    scaled += total
                scaled = scaled.to(out_ptr.dtype.element_ty)
                tl.store(grad_history_ptr + start + elements, scaled, mask=exists_here)


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(
    grad_ptr, x_ptr, history_ptr, sums_ptr,
    B, H, units, tiles, rows, CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, C, TAPS: tl.constexpr, SUM_GRAD: tl.constexpr,
):  # fmt: skip
    """Sums over a program's pixels of grad times shifted x, grad times history, and grad."""
    W = units * UNIT
    channels, columns, begin, end = tile_and_span(tiles, rows, H, BLOCK_C, BLOCK_W)
    channel_stride, row_stride, step = strides_of(C, H, W, CHANNELS_LAST)
    first_row = channels[:, None] * channel_stride + columns[None, :] * step
    exists = channels < C
    inside = exists[:, None] & (columns < W)[None, :]
    left, right = sides_of(inside, columns, W, UNIT)
    sample = tl.program_id(0).to(tl.int64)
    start = sample * C * H * W
    x, grad = x_ptr + start, grad_ptr + start
    zero = tl.zeros((BLOCK_C, BLOCK_W), dtype=tl.float32)
    s4, history_total, grad_total = zero, zero, zero
    if TAPS == 9:
        s0, s1, s2, s3, s5, s6, s7, s8 = zero, zero, zero, zero, zero, zero, zero, zero
        above, at = zero, zero
        # Rows of x, beside the rows of grad above, at and below each, of which those outside the
        # span are 0: they belong to other programs.
        for pair in range(begin - 1, end + 1, 2):
            for second in tl.static_range(2):
                row = pair + second
                elements = first_row + row * row_stride
                below = load_within(grad + (elements + row_stride), inside, row + 1, begin, end)
                below = below.to(tl.float32)
                x_left, x_at, x_right = load_row(x + elements, step, left, inside, right, row, H)
                x_left, x_at, x_right = neighbours(x_left, x_at, x_right, UNIT)
                s0 += below * x_left
                s1 += below * x_at
                s2 += below * x_right
                s3 += at * x_left
                s4 += at * x_at
                s5 += at * x_right
                s6 += above * x_left
                s7 += above * x_at
                s8 += above * x_right
                if history_ptr is not None:
                    history = load_within(history_ptr + start + elements, inside, row, begin, end)
                    history_total += at * history.to(tl.float32)
                if SUM_GRAD:
                    grad_total += at
                above = at
                at = below
    else:
        for row in range(begin, end):
            elements = first_row + row * row_stride
            at = load_within(grad + elements, inside, row, begin, end).to(tl.float32)
            s4 += at * load_within(x + elements, inside, row, begin, end).to(tl.float32)
            if history_ptr is not None:
                history = load_within(history_ptr + start + elements, inside, row, begin, end)
                history_total += at * history.to(tl.float32)
            if SUM_GRAD:
                grad_total += at
    sums = sums_ptr + (tl.program_id(2) * B + sample) * (TAPS + 2) * C + channels
    tl.store(sums + TAPS // 2 * C, tl.sum(s4, axis=1), mask=exists)
    if TAPS == 9:
        tl.store(sums, tl.sum(s0, axis=1), mask=exists)
        tl.store(sums + C, tl.sum(s1, axis=1), mask=exists)
        tl.store(sums + 2 * C, tl.sum(s2, axis=1), mask=exists)
        tl.store(sums + 3 * C, tl.sum(s3, axis=1), mask=exists)
        tl.store(sums + 5 * C, tl.sum(s5, axis=1), mask=exists)
        tl.store(sums + 6 * C, tl.sum(s6, axis=1), mask=exists)
        tl.store(sums + 7 * C, tl.sum(s7, axis=1), mask=exists)
        tl.store(sums + 8 * C, tl.sum(s8, axis=1), mask=exists)
    history_sums = sums + TAPS * C
    if history_ptr is not None:
        tl.store(history_sums, tl.sum(history_total, axis=1), mask=exists)
    if SUM_GRAD:
        tl.store(history_sums + C, tl.sum(grad_total, axis=1), mask=exists)


@cache
def row_tiling(shape: torch.Size, channels_last: bool, count: int) -> tuple[tuple, dict]:
    """Grid of a launch that shares a map out, and the arguments that say how."""
    batch, channels, height, width = shape
    if channels_last:
        block_c = min(64, next_power_of_2(channels))
        block_w = min(TILE // block_c, next_power_of_2(width))
    else:
        # The side whose tiles load the fewest columns, with those outside the map and beside tiles.
        block_w = min((64, 32, 16), key=lambda side: ceil_div(width, side) * (side + 4))
        block_w = min(block_w, next_power_of_2(width))
        block_c = min(TILE // block_w, next_power_of_2(channels))
    groups, tiles = ceil_div(channels, block_c), ceil_div(width, block_w)
    spans = max(1, count // (batch * groups * tiles))
    rows = min(height, max(SHORTEST, 2 * ceil_div(height, 2 * spans)))
    unit = 1 if channels_last else math.gcd(width, max(1, block_c * block_w // THREADS))
    sizes = dict(H=height, units=width // unit, tiles=tiles, rows=rows)
    sides = dict(CHANNELS_LAST=channels_last, UNIT=unit, BLOCK_C=block_c, BLOCK_W=block_w)
    return (batch, groups, tiles * ceil_div(height, rows)), sizes | sides


def compile_key(shape: torch.Size, channels_last: bool) -> tuple[int, ...]:
    """What of a map's shape these kernels are compiled for, and which loops go round twice."""
    _, tiling = row_tiling(shape, channels_last, 1)
    _, channels, height, width = shape
    block_c, block_w = tiling["BLOCK_C"], tiling["BLOCK_W"]
    sides = (channels, block_c), (width, block_w), (height, SHORTEST)
    return tiling["UNIT"], block_c, block_w, *[min(2, ceil_div(*side)) for side in sides]


def convolve(
    x, weight, *, gain=None, slope=None, offset=None, history=None, residual=False, out,
    flip=False, relu_output=None, grad_history=None, pending=NOTHING_PENDING,
) -> None:  # fmt: skip
    """See `Passes.convolve`; the arguments after out are those of `convolve_backward`."""
    grid, tiling = row_tiling(x.shape, not x.is_contiguous(), programs(x.device))
    inputs = dict(
        x_ptr=x, history_ptr=history, weight_ptr=weight, gain_ptr=gain, slope_ptr=slope,
        offset_ptr=offset, relu_output_ptr=relu_output, grad_qk_ptr=pending.grad_qk,
        query_weight_ptr=pending.query_weight, key_weight_ptr=pending.key_weight,
        grad_params_ptr=pending.grad_params, grad_qk_weights_ptr=pending.grad_qk_weights,
    )  # fmt: skip
    outputs = dict(
        out_ptr=out, grad_history_ptr=grad_history, grad_params_sum_ptr=pending.grad_params_sum,
        grad_qk_weights_sum_ptr=pending.grad_qk_weights_sum,
    )  # fmt: skip
    numbers = dict(tiling, **pending.sizes, C=x.shape[1], FLIP=flip, RESIDUAL=residual)
    launch(convolve_kernel, grid, inputs, outputs, numbers)


def grid_sums(grad, x, *, history=None, convolved, sum_grad) -> Tensor:
    """See `Passes.grid_sums`; a part for each span of the grid."""
    grid, tiling = row_tiling(x.shape, not x.is_contiguous(), programs(x.device))
    batch, channels = x.shape[:2]
    taps = 9 if convolved else 1
    sums = torch.empty(grid[2], batch, taps + 2, channels, dtype=torch.float32, device=x.device)
    inputs = dict(grad_ptr=grad, x_ptr=x, history_ptr=history)
    numbers = dict(B=batch) | tiling | dict(C=channels, TAPS=taps, SUM_GRAD=sum_grad)
    launch(sums_kernel, grid, inputs, dict(sums_ptr=sums), numbers)
    return sums


def convolve_backward(
    grad, weight, *, gain=None, slope=None, grad_pixel, extra_grad=None, residual=False,
    relu_output=None, grad_x, grad_history=None,
) -> None:  # fmt: skip
    """See `Passes.convolve_backward`."""
    pending = grad_pixel if isinstance(grad_pixel, PendingGradients) else NOTHING_PENDING
    convolve(
        grad, weight, gain=gain, slope=slope, offset=grad_pixel.known, history=extra_grad,
        residual=residual, out=grad_x, flip=True, relu_output=relu_output,
        grad_history=grad_history, pending=pending,
    )  # fmt: skip
