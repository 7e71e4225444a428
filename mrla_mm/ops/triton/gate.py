"""The coefficients of MRLA-light and their gradients as three Triton kernels.

`coefficients` does the same in some thirty small operations forward and fifty backward, whose launches, not their work,
a GPU would wait for at the batch sizes of detection.

    coefficients          pooled -> query, key, gate, and the coefficients; a program per sample and head
    gate_backward         sums over the grid -> gradients of query and key; a program per sample and head
    parameters_backward   these and the sums -> gradients of pooled and parameters; a program per block of channels

Everything is in float32, and every sum has one order: results are the same to the bit in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops import coefficients as plain
from mrla_mm.ops.coefficients import Affine, Coefficients, Gate, GridSums, LightWeights
from mrla_mm.ops.triton.launch import launch

BLOCK_B, BLOCK_C = 16, 32  # samples by channels that a program of parameters_backward takes at a time
MAX_KERNEL_SIZE = 16  # weights of the query and key convolutions that the kernels can hold


@triton.jit
def convolved(row_ptr, weight_ptr, channels, inside, C, K: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Convolution of a row along its channels; FLIP: the transposed one."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(K):
        at = channels + (K // 2 - tap if FLIP else tap - K // 2)
        value = tl.load(row_ptr + at, mask=inside & (at >= 0) & (at < C), other=0.0)
        total += tl.load(weight_ptr + tap).to(tl.float32) * value
    return total


@triton.jit
def coefficients_kernel(
    pooled_ptr, query_ptr, key_ptr, value_ptr, lambda_ptr, scale_ptr, offset_ptr, keep_ptr,
    query_key_ptr, gate_ptr, taps_ptr, slope_ptr, shift_ptr, C, D, root,
    K: tl.constexpr, TAPS: tl.constexpr, VALUE: tl.constexpr, HISTORY: tl.constexpr, LEARNED: tl.constexpr,
    AFFINE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate of one sample and head, and its channels' taps, slope and shift."""
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    inside = inner < D
    row = sample * C
    query = convolved(pooled_ptr + row, query_ptr, channels, inside, C, K, BLOCK, False)
    key = convolved(pooled_ptr + row, key_ptr, channels, inside, C, K, BLOCK, False)
    tl.store(query_key_ptr + 2 * row + channels, query, mask=inside)
    tl.store(query_key_ptr + 2 * row + C + channels, key, mask=inside)
    gate = tl.sigmoid(tl.sum(tl.where(inside, query * key, 0.0), axis=0) * root)
    tl.store(gate_ptr + sample * (C // D) + head, gate)
    keep = tl.load(keep_ptr + sample).to(tl.float32) if KEEP else 1.0
    factor = keep + tl.zeros((BLOCK,), dtype=tl.float32)
    if AFFINE:
        factor *= tl.load(scale_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(offset_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(shift_ptr + row + channels, keep * offset, mask=inside)
    for tap in tl.static_range(TAPS):
        weight = gate * factor
        if VALUE:
            weight *= tl.load(value_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        tl.store(taps_ptr + (row + channels) * TAPS + tap, weight, mask=inside)
    if HISTORY:
        if LEARNED:
            factor *= tl.load(lambda_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(slope_ptr + row + channels, factor, mask=inside)


@triton.jit
def gate_backward_kernel(
    grad_taps_ptr, query_key_ptr, gate_ptr, value_ptr, scale_ptr, keep_ptr, grad_query_key_ptr, C, D, root,
    TAPS: tl.constexpr, VALUE: tl.constexpr, AFFINE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one sample's and head's query and key."""
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    inside = inner < D
    row = sample * C
    grad_gain = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        part = tl.load(grad_taps_ptr + (row + channels) * TAPS + tap, mask=inside, other=0.0)
        if VALUE:
            part *= tl.load(value_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        grad_gain += part
    if AFFINE:
        grad_gain *= tl.load(scale_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    grad_gate = tl.sum(grad_gain, axis=0)
    if KEEP:
        grad_gate *= tl.load(keep_ptr + sample).to(tl.float32)
    gate = tl.load(gate_ptr + sample * (C // D) + head)
    grad_score = grad_gate * gate * (1.0 - gate) * root
    query = tl.load(query_key_ptr + 2 * row + channels, mask=inside, other=0.0)
    key = tl.load(query_key_ptr + 2 * row + C + channels, mask=inside, other=0.0)
    tl.store(grad_query_key_ptr + 2 * row + channels, grad_score * key, mask=inside)
    tl.store(grad_query_key_ptr + 2 * row + C + channels, grad_score * query, mask=inside)


@triton.jit
def parameters_backward_kernel(
    grad_taps_ptr, grad_slope_ptr, grad_shift_ptr, grad_query_key_ptr, pooled_ptr, gate_ptr,
    query_ptr, key_ptr, value_ptr, lambda_ptr, scale_ptr, keep_ptr,
    constant_ptr, grad_weights_ptr, grad_value_ptr, grad_lambda_ptr, grad_scale_ptr, grad_offset_ptr,
    B, C, D, positions,
    K: tl.constexpr, TAPS: tl.constexpr, VALUE: tl.constexpr, HISTORY: tl.constexpr, LEARNED: tl.constexpr,
    AFFINE: tl.constexpr, KEEP: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of pooled, over the positions of the grid, and sums over the samples for the parameters."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channels < C
    slots = tl.arange(0, 16)
    grad_taps = tl.zeros((BLOCK_C, 16), dtype=tl.float32)
    grad_query = tl.zeros((16,), dtype=tl.float32)
    grad_key = tl.zeros((16,), dtype=tl.float32)
    grad_scale = tl.zeros((BLOCK_C,), dtype=tl.float32)
    grad_history = tl.zeros((BLOCK_C,), dtype=tl.float32)
    grad_offset = tl.zeros((BLOCK_C,), dtype=tl.float32)
    scale = tl.zeros((BLOCK_C,), dtype=tl.float32) + 1.0
    if AFFINE:
        scale = tl.load(scale_ptr + channels, mask=exists, other=0.0).to(tl.float32)
    history = tl.zeros((BLOCK_C,), dtype=tl.float32) + 1.0
    if LEARNED:
        history = tl.load(lambda_ptr + channels, mask=exists, other=0.0).to(tl.float32)
    for start in range(0, B, BLOCK_B):
        samples = start + tl.arange(0, BLOCK_B)
        inside = (samples[:, None] < B) & exists[None, :]
        rows = samples[:, None] * C
        place = rows + channels[None, :]
        gate = tl.load(gate_ptr + samples[:, None] * (C // D) + channels[None, :] // D, mask=inside, other=0.0)
        keep = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32) + 1.0
        if KEEP:
            keep *= tl.load(keep_ptr + samples, mask=samples < B, other=0.0).to(tl.float32)[:, None]
        grad_gain = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            part = tl.load(grad_taps_ptr + place * TAPS + tap, mask=inside, other=0.0)
            found = tl.sum(part * gate * keep, axis=0) * scale
            grad_taps += tl.where(slots[None, :] == tap, found[:, None], 0.0)
            if VALUE:
                part *= tl.load(value_ptr + channels * TAPS + tap, mask=exists, other=0.0).to(tl.float32)[None, :]
            grad_gain += part
        grad_factor = grad_gain * gate
        if HISTORY:
            part = tl.load(grad_slope_ptr + place, mask=inside, other=0.0)
            grad_history += tl.sum(part * keep, axis=0) * scale
            grad_factor += part * history[None, :]
        if AFFINE:
            grad_scale += tl.sum(grad_factor * keep, axis=0)
            grad_offset += tl.sum(tl.load(grad_shift_ptr + place, mask=inside, other=0.0) * keep, axis=0)
        grad_pooled = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
        here = grad_query_key_ptr + 2 * rows
        query = tl.load(here + channels[None, :], mask=inside, other=0.0)
        key = tl.load(here + C + channels[None, :], mask=inside, other=0.0)
        for tap in tl.static_range(K):
            at = channels[None, :] + tap - K // 2
            pooled = tl.load(pooled_ptr + rows + at, mask=inside & (at >= 0) & (at < C), other=0.0)
            grad_query += tl.where(slots == tap, tl.sum(tl.sum(query * pooled, axis=1), axis=0), 0.0)
            grad_key += tl.where(slots == tap, tl.sum(tl.sum(key * pooled, axis=1), axis=0), 0.0)
            back = channels[None, :] + K // 2 - tap
            near = inside & (back >= 0) & (back < C)
            grad_pooled += tl.load(query_ptr + tap).to(tl.float32) * tl.load(here + back, mask=near, other=0.0)
            grad_pooled += tl.load(key_ptr + tap).to(tl.float32) * tl.load(here + C + back, mask=near, other=0.0)
        tl.store(constant_ptr + place, grad_pooled / positions, mask=inside)
    own = tl.program_id(0) * 2 * K
    tl.store(grad_weights_ptr + own + slots, grad_query, mask=slots < K)
    tl.store(grad_weights_ptr + own + K + slots, grad_key, mask=slots < K)
    if VALUE:
        place = channels[:, None] * TAPS + slots[None, :]
        tl.store(grad_value_ptr + place, grad_taps, mask=exists[:, None] & (slots[None, :] < TAPS))
    if LEARNED:
        tl.store(grad_lambda_ptr + channels, grad_history, mask=exists)
    if AFFINE:
        tl.store(grad_scale_ptr + channels, grad_scale, mask=exists)
        tl.store(grad_offset_ptr + channels, grad_offset, mask=exists)


def supports(weights: LightWeights) -> bool:
    """Whether the kernels can compute a gate: one whose query and key are short convolutions."""
    query = weights.query
    return query is not None and query.dim() == 3 and query.shape[-1] <= MAX_KERNEL_SIZE


def light_coefficients(
    x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, *, heads: int, has_history: bool
) -> tuple[Gate, Coefficients]:
    """See `coefficients.light_coefficients`."""
    if not supports(weights):
        return plain.light_coefficients(x, gate, weights, affine, heads=heads, has_history=has_history)
    pooled = gate.pooled
    (batch, channels), new = pooled.shape, pooled.new_empty
    query, key, value, history_scale = weights
    scale, offset, keep = affine or (None, None, None)
    size = 1 if value is None else 9
    query_key, gates = new(batch, 2, channels), new(batch, heads)
    taps, shift = new(batch, channels, size), None if affine is None else new(batch, channels)
    slope = new(batch, channels) if has_history else None
    launch(
        coefficients_kernel, (batch, heads),
        *(pooled if t is None else t for t in (pooled, query, key, value, history_scale, scale, offset, keep)),
        *(query_key, gates, taps, gates if slope is None else slope, gates if shift is None else shift),
        channels, channels // heads, (channels // heads) ** -0.5, K=query.shape[-1], TAPS=size,
        VALUE=value is not None, HISTORY=has_history, LEARNED=history_scale is not None, AFFINE=affine is not None,
        KEEP=keep is not None, BLOCK=triton.next_power_of_2(channels // heads),
    )  # fmt: skip
    return Gate(pooled, query_key, gates), Coefficients(taps, slope, shift)


def light_coefficients_backward(
    x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, sums: GridSums
) -> tuple[Tensor | None, list[Tensor | None]]:
    """See `coefficients.light_coefficients_backward`."""
    if not supports(weights):
        return plain.light_coefficients_backward(x, gate, weights, affine, sums)
    pooled, query_key, gates = gate
    (batch, channels), heads, new = pooled.shape, gates.shape[1], pooled.new_empty
    query, key, value, history_scale = weights
    scale, _, keep = affine or (None, None, None)
    size, kernel, width = sums.taps.shape[-1], query.shape[-1], channels // heads
    flags = dict(TAPS=size, VALUE=value is not None, AFFINE=affine is not None, KEEP=keep is not None)
    grad_query_key = torch.empty_like(query_key)
    launch(
        gate_backward_kernel, (batch, heads),
        sums.taps, query_key, gates, *(pooled if t is None else t for t in (value, scale, keep)), grad_query_key,
        channels, width, width**-0.5, BLOCK=triton.next_power_of_2(width), **flags,
    )  # fmt: skip
    blocks = triton.cdiv(channels, BLOCK_C)
    constant, grad_weights = new(batch, channels), new(blocks, 2, kernel)
    grad_value, grad_history = (None if t is None else new(t.shape) for t in (value, history_scale))
    grad_scale, grad_offset = (None if affine is None else new(channels) for _ in range(2))
    given = (sums.taps, sums.slope, sums.shift, grad_query_key, pooled, gates, query, key, value, history_scale)
    made = (constant, grad_weights, grad_value, grad_history, grad_scale, grad_offset)
    launch(
        parameters_backward_kernel, (blocks,),
        *(pooled if t is None else t for t in (*given, scale, keep)), *(constant if t is None else t for t in made),
        batch, channels, width, x.shape[2] * x.shape[3], K=kernel, HISTORY=sums.slope is not None,
        LEARNED=history_scale is not None, BLOCK_B=min(BLOCK_B, triton.next_power_of_2(batch)), BLOCK_C=BLOCK_C,
        **flags,
    )  # fmt: skip
    grad_query, grad_key = grad_weights.sum(0).view(2, 1, 1, kernel).unbind(0)
    return constant, [grad_query, grad_key, grad_value, grad_history, grad_scale, grad_offset]
