"""The maps' part of fused layer attention as Triton kernels, in as few passes over memory as the mathematics allows.

    light forward    pool: read x                    apply: read x and the history, write y
    light backward   sums: read grad, x, history     apply: read grad, write the gradients of x and the history
    block's end      activate: read c and the shortcut, write x and pool it; apply backward masks by x > 0 as it writes
    sum forward      read each value and x, write y  sum backward: read grad and each value, write each gradient

Numbers are loaded in the map's precision, computed in float32 and rounded once, when stored. Where a kernel sums, each
program writes the sum of its span of the grid, and the spans are added up afterwards: sums are taken in one order and
nothing is added atomically, so results are the same to the bit in every run. Map elements are addressed by their
strides, so contiguous and channels-last maps of any size are read as they lie; BLOCK_C channels by BLOCK_S positions
form a tile, with the longer side along the dense dimension.

The kernels run on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.gating import Coefficients, MapSums
from mrla_mm.ops.launching import launch, launcher
from mrla_mm.ops.library import SCHEMAS
from mrla_mm.ops.triton_stencil import PROGRAMS, apply_kernel, check_size, rowwise, sums_kernel

MAX_GRID = 65535  # programs that CUDA takes along the second and third side of a grid
MAX_VALUES = 8  # values that one launch reads; a deeper stage takes several launches, each adding to the last's result


@triton.jit
def tile_offsets(sample, channels, spots, C, S, stride_c, stride_s):
    """Element offsets of a tile of channels by positions in a map, and which of them exist."""
    inside = (channels[:, None] < C) & (spots[None, :] < S)
    return sample * C * S + channels[:, None] * stride_c + spots[None, :] * stride_s, inside


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
def activate_kernel(
    c_ptr, shortcut_ptr, out_ptr, pooled_ptr, B, C, S, stride_c, stride_s, span,
    POOL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute out = relu(c + shortcut) and, POOL: its mean over the grid, of the rounded numbers."""
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
def sum_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, start_ptr, x_ptr, weights_ptr, shift_ptr, out_ptr,
    C, S, T, first, stride_c, stride_s, shift_stride,
    COUNT: tl.constexpr, START: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute out = [start +] sum_s weights_s v_s [+ shift] [+ x] over COUNT of the T values, from `first` on."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    spots = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)
    offsets, inside = tile_offsets(sample, channels, spots, C, S, stride_c, stride_s)
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
def sum_backward_kernel(
    grad_ptr, v0, v1, v2, v3, v4, v5, v6, v7, g0, g1, g2, g3, g4, g5, g6, g7, weights_ptr, sums_ptr,
    B, C, S, T, first, stride_c, stride_s, span, COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Gradient of each value, weights_s grad, and the sum over a span of the grid of grad times the value."""
    sample = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channels < C
    sums = tl.arange(0, 8)
    total = tl.zeros((BLOCK_C, 8), dtype=tl.float32)
    place = (sample * C + channels) * T + first
    begin = tl.program_id(2) * span
    for start in range(begin, begin + span, BLOCK_S):
        spots = start + tl.arange(0, BLOCK_S)
        offsets, inside = tile_offsets(sample, channels, spots, C, S, stride_c, stride_s)
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        for index in tl.static_range(COUNT):
            value = tl.load(pick(index, v0, v1, v2, v3, v4, v5, v6, v7) + offsets, mask=inside, other=0.0)
            dot = tl.sum(grad * value.to(tl.float32), axis=1)
            total += tl.where(sums[None, :] == index, dot[:, None], 0.0)
            weight = tl.load(weights_ptr + place + index, mask=exists, other=0.0)
            if index == 0:  # in place of pick(), which torch.compile would take to write to all that it is given
                target = g0
            elif index == 1:
                target = g1
            elif index == 2:
                target = g2
            elif index == 3:
                target = g3
            elif index == 4:
                target = g4
            elif index == 5:
                target = g5
            elif index == 6:
                target = g6
            else:
                target = g7
            tl.store(target + offsets, (weight[:, None] * grad).to(target.dtype.element_ty), mask=inside)
    place += tl.program_id(2) * B * C * T
    tl.store(sums_ptr + place[:, None] + sums[None, :], total, mask=exists[:, None] & (sums[None, :] < COUNT))


def tiling(x: Tensor) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Tile sides and launch grid for a map, its positions spread over programs."""
    check_size(x)
    batch, channels, height, width = x.shape
    spots = height * width
    if x.is_contiguous():
        block_s = min(512, triton.next_power_of_2(spots))
        block_c = max(1, min(2048 // block_s, triton.next_power_of_2(channels), 16))
    else:
        block_c = min(64, triton.next_power_of_2(channels))
        block_s = min(32, triton.next_power_of_2(spots))
    while triton.cdiv(spots, block_s) > MAX_GRID:
        block_s *= 2
    grid = (batch, triton.cdiv(channels, block_c), triton.cdiv(spots, block_s))
    return dict(BLOCK_C=block_c, BLOCK_S=block_s), grid


def summing(x: Tensor) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Tile sides, span and launch grid for sums over the grid: a program sums a span, and few maps take many spans."""
    blocks, (batch, rows, tiles) = tiling(x)
    per_program = max(1, tiles * batch * rows // PROGRAMS)
    spans = triton.cdiv(tiles, per_program)
    return dict(span=per_program * blocks["BLOCK_S"], **blocks), (batch, rows, spans)


def joined(partial: Tensor) -> Tensor:
    """Sum of what the spans' programs found, always in the same order."""
    return partial[0] if len(partial) == 1 else partial.sum(0)


def strides(x: Tensor) -> tuple[int, int]:
    """Distance in memory between channels and between positions of a dense map."""
    return (x.shape[2] * x.shape[3], 1) if x.is_contiguous() else (1, x.shape[1])


def row_stride(per_channel: Tensor | None) -> int:
    """Distance between samples of (B or 1, C), 0 where all samples share the numbers."""
    return per_channel.shape[1] if per_channel is not None and per_channel.shape[0] > 1 else 0


@torch.library.triton_op("mrla_mm::triton_pool", mutates_args=())
def pool_op(x: Tensor) -> Tensor:
    """`pool` as an operator."""
    blocks, grid = summing(x)
    out = torch.empty(grid[2], *x.shape[:2], dtype=torch.float32, device=x.device)
    launch(launcher(pool_kernel), grid, x, out, *x.shape[:2], x.shape[2] * x.shape[3], *strides(x), **blocks)
    return joined(out)


@torch.library.triton_op("mrla_mm::triton_light_forward", mutates_args=(), schema=SCHEMAS["light_forward"])
def light_forward_op(
    x: Tensor, previous: Tensor | None, taps: Tensor, slope: Tensor | None, shift: Tensor | None, residual: bool
) -> Tensor:
    """`light_forward` as an operator."""
    out = torch.empty_like(x)
    blocks, grid = rowwise(x)
    launch(
        launcher(apply_kernel), grid,
        x, x if previous is None else previous, taps, taps if slope is None else slope,
        taps if shift is None else shift, x, out, out, *x.shape[1:3],
        slope_stride=row_stride(slope), shift_stride=row_stride(shift),
        TAPS=taps.shape[-1], FLIP=False, RESIDUAL=residual, HISTORY=previous is not None, SHIFT=shift is not None,
        SCALED=False, MASK=False, **blocks,
    )  # fmt: skip
    return out


@torch.library.triton_op("mrla_mm::triton_light_backward", mutates_args=(), schema=SCHEMAS["masked_backward"])
def light_backward_op(
    grad: Tensor, taps: Tensor, slope: Tensor | None, constant: Tensor | None, mask: Tensor | None, residual: bool
) -> list[Tensor]:
    """`light_backward` and `block_backward` as an operator: of x and, given a slope, of the history."""
    by_x = torch.empty_like(grad)
    by_previous = by_x if slope is None else torch.empty_like(grad)
    blocks, grid = rowwise(grad)
    launch(
        launcher(apply_kernel), grid,
        grad, grad, taps, taps if slope is None else slope, taps if constant is None else constant,
        grad if mask is None else mask, by_x, by_previous,
        *grad.shape[1:3], slope_stride=row_stride(slope), shift_stride=row_stride(constant),
        TAPS=taps.shape[-1], FLIP=True, RESIDUAL=residual, HISTORY=False, SHIFT=constant is not None,
        SCALED=slope is not None, MASK=mask is not None, **blocks,
    )  # fmt: skip
    return [by_x] if slope is None else [by_x, by_previous]


@torch.library.triton_op("mrla_mm::triton_light_sums", mutates_args=(), schema=SCHEMAS["light_sums"])
def light_sums_op(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, shift: bool) -> list[Tensor]:
    """`light_sums` as an operator, without what is absent."""
    blocks, grid = rowwise(x)
    by_taps = torch.empty(grid[2], *x.shape[:2], size, dtype=torch.float32, device=x.device)
    by_slope, by_shift = (
        torch.empty(by_taps.shape[:3], dtype=torch.float32, device=x.device) if there else by_taps
        for there in (previous is not None, shift)
    )
    launch(
        launcher(sums_kernel), grid,
        grad, x, x if previous is None else previous, by_taps, by_slope, by_shift, *x.shape[:3],
        TAPS=size, HISTORY=previous is not None, SHIFT=shift, **blocks,
    )  # fmt: skip
    return [joined(by_taps), *([] if previous is None else [joined(by_slope)]), *([joined(by_shift)] if shift else [])]


@torch.library.triton_op("mrla_mm::triton_sum_forward", mutates_args=(), schema=SCHEMAS["sum_forward"])
def sum_forward_op(x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor]) -> Tensor:
    """`sum_forward` as an operator; partial sums of deep stages are kept in float32."""
    like = values[0]
    blocks, grid = tiling(like)
    total = None
    for first in range(0, len(values), MAX_VALUES):
        part = list(values[first : first + MAX_VALUES])
        last = first + MAX_VALUES >= len(values)
        out = torch.empty_like(like) if last else torch.empty_like(like, dtype=torch.float32)
        add_x, add_shift = last and x is not None, last and shift is not None
        launch(
            launcher(sum_kernel), grid,
            *part, *[like] * (MAX_VALUES - len(part)), like if total is None else total, x if add_x else like,
            weights, shift if add_shift else weights, out, like.shape[1], like.shape[2] * like.shape[3], len(values),
            first, *strides(like), row_stride(shift) if add_shift else 0,
            COUNT=len(part), START=total is not None, RESIDUAL=add_x, SHIFT=add_shift, **blocks,
        )  # fmt: skip
        total = out
    return total


@torch.library.triton_op("mrla_mm::triton_sum_backward", mutates_args=(), schema=SCHEMAS["sum_backward"])
def sum_backward_op(grad: Tensor, weights: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """`sum_backward` as an operator, the sums first."""
    blocks, grid = summing(grad)
    sums = torch.empty(grid[2], *weights.shape, dtype=weights.dtype, device=weights.device)
    gradients = [torch.empty_like(value) for value in values]
    for first in range(0, len(values), MAX_VALUES):
        part, targets = values[first : first + MAX_VALUES], gradients[first : first + MAX_VALUES]
        missing = MAX_VALUES - len(part)
        launch(
            launcher(sum_backward_kernel), grid,
            grad, *part, *[grad] * missing, *targets, *[targets[0]] * missing, weights, sums, *grad.shape[:2],
            grad.shape[2] * grad.shape[3], len(values), first, *strides(grad), COUNT=len(part), **blocks,
        )  # fmt: skip
    return [joined(sums), *gradients]


def pool(x: Tensor) -> Tensor:
    """Average over the grid in single precision: (B, C, H, W) -> (B, C)."""
    return pool_op(x)


def light_forward(x: Tensor, previous: Tensor | None, coefficients: Coefficients, *, residual: bool) -> Tensor:
    """Map part of light attention: [x +] dw(x; taps) + slope previous + shift, all (B, C, H, W)."""
    return light_forward_op(x, previous, *coefficients, residual)


def light_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, *, shift: bool) -> MapSums:
    """Sums over the grid that the gradients of all weights follow from; size taps, 9 or 1, and shift if wanted."""
    found = light_sums_op(grad, x, previous, size, shift)
    return MapSums(found[0], None if previous is None else found[1], found[-1] if shift else None)


def light_backward(
    grad: Tensor, coefficients: Coefficients, constant: Tensor | None, *, residual: bool, history: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and previous: the transposed of `light_forward`, plus a constant per sample and channel."""
    slope = coefficients.slope if history else None
    found = light_backward_op(grad, coefficients.taps, slope, constant, None, residual)
    return found[0], found[1] if history else None


def activate(c: Tensor, shortcut: Tensor, *, pooled: bool) -> tuple[Tensor, Tensor | None]:
    """Compute x = relu(c + shortcut), (B, C, H, W), and its average over the grid (B, C) if wanted."""
    x = torch.empty_like(c)
    blocks, grid = summing(c)
    averages = torch.empty(grid[2], *c.shape[:2], dtype=torch.float32, device=c.device) if pooled else None
    launch(
        activate_kernel, grid,
        c, shortcut, x, x if averages is None else averages, *c.shape[:2], c.shape[2] * c.shape[3], *strides(c),
        POOL=pooled, **blocks,
    )  # fmt: skip
    return x, None if averages is None else joined(averages)


def block_backward(
    grad: Tensor, x: Tensor, coefficients: Coefficients, constant: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients through `light_forward` with residual and `activate`'s ReLU: of c, and of the shortcut."""
    found = light_backward_op(grad, coefficients.taps, coefficients.slope, constant, x, True)
    return found[0], found[-1]


def sum_forward(x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor]) -> Tensor:
    """Weighted sum of values, [x +] sum_s weights_s values_s [+ shift], each read once."""
    return sum_forward_op(x, weights, shift, list(values))


def sum_backward(grad: Tensor, weights: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sums over the grid of grad times each value (B, C, T), and the gradients of the values, weights_s grad."""
    sums, *gradients = sum_backward_op(grad, weights, list(values))
    return sums, gradients
