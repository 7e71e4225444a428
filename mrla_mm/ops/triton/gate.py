"""The scores of MRLA-light and -base and their gradients as three Triton kernels.

`coefficients` does the same in some thirty small operations forward and fifty backward, whose
launches, not their work, a GPU would wait for at the batch sizes of detection.

    coefficients_kernel          pooled -> query, keys, scores, gain, slope and offset
    scores_backward_kernel       sums over the grid -> gradients of query and keys
    parameters_backward_kernel   these and the sums -> gradients of pooled and of the parameters

The first two have a program per sample and head, the last one per block of channels. What other
kernels leave is a sum for each span of the grid; here the spans are added up on the way. Everything
is in float32, and every sum has one order: results are the same to the bit in every run.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.coefficients import Attention, Coefficients, Layer, Parameters, Saved
from mrla_mm.ops.reference import BatchNorm
from mrla_mm.ops.triton.launch import Unsupported, ceil_div, launch, next_power_of_2

BLOCK_B = 16  # samples that a program of parameters_backward_kernel takes at a time
BLOCK_C = 32  # its channels
MAX_KERNEL_SIZE = 16  # weights of the query and key convolutions that the kernels can hold
# Planes of a sample that scores_backward_kernel leaves: gradients of query, key, factor, offset and
# slope; then the sums for each tap of the value's kernel.
QUERY, KEY, FACTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OFFSET, SLOPE, FIRST_TAP = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)


@triton.jit
def load(pointers, mask):
    """Elements in float32, 0 beyond the mask."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_or(pointer, places, mask, other: tl.constexpr):
    """Elements in float32; `other` where there is no tensor."""
    if pointer is None:
        return tl.full(places.shape, other, dtype=tl.float32)
    else:
        return load(pointer + places, mask)


@triton.jit
def load_scale(weight_ptr, variance_ptr, keep_ptr, eps, sample, channels, exists):
    """Factor that norm and drop path put on a sample's channels, 1 without a norm."""
    factor = load_or(weight_ptr, channels, exists, 1.0)
    if variance_ptr is not None:
        variance = tl.load(variance_ptr + channels, mask=exists, other=1.0).to(tl.float32)
        factor *= tl.rsqrt(variance + eps)
    if keep_ptr is not None:
        factor *= tl.load(keep_ptr + sample).to(tl.float32)
    return factor


@triton.jit
def sum_spans(pointer, places, mask, spans, stride, BLOCK: tl.constexpr):
    """Sum of what the programs of each span of the grid left, always in the same order."""
    ROWS: tl.constexpr = 16 if BLOCK <= 64 else 1  # spans that are loaded at a time
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, spans, ROWS):
        span = start + tl.arange(0, ROWS)[:, None]
        exists = (span < spans) & mask[None, :]
        tile = tl.load(pointer + span * stride + places[None, :], mask=exists, other=0.0)
        total += tl.sum(tile, axis=0)
    return total


@triton.jit(do_not_specialize=["B", "spans"])
def coefficients_kernel(
    partial_ptr, query_weight_ptr, key_weight_ptr, lambda_ptr,
    weight_ptr, bias_ptr, mean_ptr, variance_ptr, keep_ptr,
    earlier_ptr, pooled_ptr, query_ptr, keys_ptr, scores_ptr, gain_ptr, slope_ptr, offset_ptr,
    B, spans, logit_scale, eps, C, D, T,
    K: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`coefficients.Saved` of one sample and head, of base with SOFTMAX, else of light."""
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    inside = inner < D
    query = tl.zeros((BLOCK,), dtype=tl.float32)
    key = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        at = channels + k - K // 2
        mask = inside & (at >= 0) & (at < C)
        value = sum_spans(partial_ptr, sample * C + at, mask, spans, B * C, BLOCK)
        query += tl.load(query_weight_ptr + k).to(tl.float32) * value
        key += tl.load(key_weight_ptr + k).to(tl.float32) * value
        if k == K // 2:
            tl.store(pooled_ptr + sample * C + channels, value, mask=inside)
    tl.store(query_ptr + sample * C + channels, query, mask=inside)
    tl.store(keys_ptr + (sample * T + T - 1) * C + channels, key, mask=inside)
    score = tl.sum(tl.where(inside, query * key, 0.0), axis=0) * logit_scale
    factor = load_scale(weight_ptr, variance_ptr, keep_ptr, eps, sample, channels, inside)
    lanes = tl.arange(0, LANES)
    scores = tl.where(lanes == T - 1, score, float("-inf"))
    if earlier_ptr is not None:
        for s in range(T - 1):
            key = load(earlier_ptr + (sample * (T - 1) + s) * C + channels, inside)
            tl.store(keys_ptr + (sample * T + s) * C + channels, key, mask=inside)
            scores = tl.where(lanes == s, tl.sum(query * key, axis=0) * logit_scale, scores)
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
        gain = factor
    else:
        scores = tl.sigmoid(scores)
        gain = factor * tl.sum(scores, axis=0)
    tl.store(scores_ptr + (sample * T + lanes) * (C // D) + head, scores, mask=lanes < T)
    place = sample * C + channels
    if gain_ptr is not None:
        tl.store(gain_ptr + place, gain, mask=inside)
    if slope_ptr is not None:
        slope = factor * load_or(lambda_ptr, channels, inside, 1.0)
        tl.store(slope_ptr + place, slope, mask=inside)
    if offset_ptr is not None:
        offset = -load(mean_ptr + channels, inside)
        offset *= load_scale(weight_ptr, variance_ptr, None, eps, sample, channels, inside)
        offset += load_or(bias_ptr, channels, inside, 0.0)
        if keep_ptr is not None:
            offset *= tl.load(keep_ptr + sample).to(tl.float32)
        tl.store(offset_ptr + place, offset, mask=inside)


@triton.jit(do_not_specialize=["B", "output_spans", "spans"])
def scores_backward_kernel(
    output_sums_ptr, sums_ptr, query_ptr, keys_ptr, scores_ptr, value_ptr, lambda_ptr,
    weight_ptr, variance_ptr, keep_ptr, grad_keys_ptr, derived_ptr, grad_earlier_ptr,
    B, output_spans, spans, logit_scale, eps, C, D, T,
    TAPS: tl.constexpr, HISTORY: tl.constexpr, NORM: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of one sample's and head's query, keys and factors, and sums over the grid."""
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    inside = inner < D
    factor = load_scale(weight_ptr, variance_ptr, keep_ptr, eps, sample, channels, inside)
    query = tl.load(query_ptr + sample * C + channels, mask=inside, other=0.0)
    lanes = tl.arange(0, LANES)
    scores = load(scores_ptr + (sample * T + lanes) * (C // D) + head, lanes < T)
    grads = tl.zeros((LANES,), dtype=tl.float32)
    grad_factor = tl.zeros((BLOCK,), dtype=tl.float32)
    derived = derived_ptr + sample * (FIRST_TAP + TAPS) * C + channels
    grad_gain = tl.zeros((BLOCK,), dtype=tl.float32)
    first_plane = sample * (TAPS + 2)
    stride = B * (TAPS + 2) * C
    for index in tl.static_range(TAPS):
        place = (first_plane + index) * C + channels
        total = sum_spans(sums_ptr, place, inside, spans, stride, BLOCK)
        tl.store(derived + (FIRST_TAP + index) * C, total, mask=inside)
        grad_gain += total * load_or(value_ptr, channels * TAPS + index, inside, 1.0)
    if SOFTMAX:
        output_stride = B * (T + 1) * C
        for s in range(T):
            place = (sample * (T + 1) + s) * C + channels
            total = sum_spans(output_sums_ptr, place, inside, output_spans, output_stride, BLOCK)
            grads = tl.where(lanes == s, tl.sum(total * factor, axis=0), grads)
            grad_factor += tl.sum(tl.where(lanes == s, scores, 0.0), axis=0) * total
        grads = scores * (grads - tl.sum(scores * grads, axis=0)) * logit_scale
        grad_place = (sample * (T + 1) + T) * C + channels
    else:
        output_stride = stride
        grads += tl.sum(grad_gain * factor, axis=0)
        grads = grads * scores * (1.0 - scores) * logit_scale
        grad_factor += grad_gain * tl.sum(scores, axis=0)
        grad_place = (first_plane + TAPS + 1) * C + channels
    if HISTORY:
        place = (first_plane + TAPS) * C + channels
        slope = sum_spans(sums_ptr, place, inside, spans, stride, BLOCK)
        grad_factor += slope * load_or(lambda_ptr, channels, inside, 1.0)
        tl.store(derived + SLOPE * C, slope, mask=inside)
    grad_query = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(T):
        grad = tl.sum(tl.where(lanes == s, grads, 0.0), axis=0)
        place = (sample * T + s) * C + channels
        grad_query += grad * load(keys_ptr + place, inside)
        grad_key = grad * query + load_or(grad_keys_ptr, place, inside, 0.0)
        tl.store(derived + KEY * C, grad_key, mask=inside)  # the own key comes last, and stays
        if grad_earlier_ptr is not None:
            place = (sample * (T - 1) + s) * C + channels
            # Triton 3.9 interprets & as an integer.
            tl.store(grad_earlier_ptr + place, grad_key, mask=(inside & (s < T - 1)) != 0)
    tl.store(derived + QUERY * C, grad_query, mask=inside)
    if NORM:
        grad_offset = sum_spans(
            output_sums_ptr, grad_place, inside, output_spans, output_stride, BLOCK
        )
        tl.store(derived + FACTOR * C, grad_factor, mask=inside)
        tl.store(derived + OFFSET * C, grad_offset, mask=inside)


@triton.jit(do_not_specialize=["B", "pixels"])
def parameters_backward_kernel(
    derived_ptr, pooled_ptr, gain_ptr, query_ptr, key_ptr,
    weight_ptr, mean_ptr, variance_ptr, keep_ptr, grad_pixel_ptr, grad_projections_ptr,
    grad_value_ptr, grad_lambda_ptr, grad_weight_ptr, grad_bias_ptr, B, pixels, eps, C,
    K: tl.constexpr, TAPS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of every pixel through the average, and of parameters, summed over the samples."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channels < C
    slots = tl.arange(0, 16)
    grad_value = tl.zeros((BLOCK_C, 16), dtype=tl.float32)
    grad_query = tl.zeros((16,), dtype=tl.float32)
    grad_key = tl.zeros((16,), dtype=tl.float32)
    grad_scale = tl.zeros((BLOCK_C,), dtype=tl.float32)
    grad_offset = tl.zeros((BLOCK_C,), dtype=tl.float32)
    grad_slope = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, B, BLOCK_B):
        samples = start + tl.arange(0, BLOCK_B)
        inside = (samples[:, None] < B) & exists[None, :]
        rows = samples[:, None] * C
        place = rows + channels[None, :]
        of_sample = derived_ptr + samples[:, None] * (FIRST_TAP + TAPS) * C + channels[None, :]
        keep = load_or(keep_ptr, samples, samples < B, 1.0)[:, None]
        gain = load_or(gain_ptr, place, inside, 1.0)
        if grad_value_ptr is not None:
            for index in tl.static_range(TAPS):
                plane = tl.sum(load(of_sample + (FIRST_TAP + index) * C, inside) * gain, axis=0)
                grad_value += tl.where(slots[None, :] == index, plane[:, None], 0.0)
        if variance_ptr is not None:
            grad_scale += tl.sum(load(of_sample + FACTOR * C, inside) * keep, axis=0)
            grad_offset += tl.sum(load(of_sample + OFFSET * C, inside) * keep, axis=0)
        if grad_lambda_ptr is not None:
            grad_slope += tl.sum(load(of_sample + SLOPE * C, inside) * keep, axis=0)
        grad_pooled = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
        query = load(of_sample + QUERY * C, inside)
        key = load(of_sample + KEY * C, inside)
        for k in tl.static_range(K):
            distance = k - K // 2
            at = channels[None, :] + distance
            pooled = load(pooled_ptr + rows + at, inside & (at >= 0) & (at < C))
            of_query = tl.sum(tl.sum(query * pooled, axis=1), axis=0)
            of_key = tl.sum(tl.sum(key * pooled, axis=1), axis=0)
            grad_query += tl.where(slots == k, of_query, 0.0)
            grad_key += tl.where(slots == k, of_key, 0.0)
            back = channels[None, :] - distance
            near = inside & (back >= 0) & (back < C)
            query_weight = tl.load(query_ptr + k).to(tl.float32)
            key_weight = tl.load(key_ptr + k).to(tl.float32)
            grad_pooled += query_weight * load(of_sample + QUERY * C - distance, near)
            grad_pooled += key_weight * load(of_sample + KEY * C - distance, near)
        tl.store(grad_pixel_ptr + place, grad_pooled / pixels, mask=inside)
    own = tl.program_id(0) * 2 * K
    tl.store(grad_projections_ptr + own + slots, grad_query, mask=slots < K)
    tl.store(grad_projections_ptr + own + K + slots, grad_key, mask=slots < K)
    if grad_value_ptr is not None:
        place = channels[:, None] * TAPS + slots[None, :]
        mask = exists[:, None] & (slots[None, :] < TAPS)
        tl.store(grad_value_ptr + place, grad_value, mask=mask)
    root = load_scale(None, variance_ptr, None, eps, 0, channels, exists)
    if grad_lambda_ptr is not None:
        scale = root * load_or(weight_ptr, channels, exists, 1.0)
        tl.store(grad_lambda_ptr + channels, grad_slope * scale, mask=exists)
    if variance_ptr is not None:
        mean = load(mean_ptr + channels, exists)
        if grad_weight_ptr is not None:
            grad_weight = root * (grad_scale - mean * grad_offset)
            tl.store(grad_weight_ptr + channels, grad_weight, mask=exists)
        if grad_bias_ptr is not None:
            tl.store(grad_bias_ptr + channels, grad_offset, mask=exists)


def compile_key(shape: torch.Size, heads: int) -> tuple[int, ...]:
    """What of a map's shape these kernels are compiled for, and which loops go round twice."""
    batch, channels = shape[:2]
    blocks = [min(2, ceil_div(batch, BLOCK_B)), min(2, ceil_div(channels, BLOCK_C))]
    block_b = min(BLOCK_B, next_power_of_2(batch))
    return block_b, channels // heads, channels == 1, channels % 16 == 0, min(2, heads), *blocks


def check_support(layer: Layer) -> None:
    """Raise `Unsupported` for a layer whose query and key are not short convolutions."""
    query = layer.weights.query
    if query is None or query.dim() != 3 or query.shape[-1] > MAX_KERNEL_SIZE:
        raise Unsupported


def norm_tensors(norm: BatchNorm | None) -> tuple[Sequence[Tensor | None], float]:
    """The five tensors of a norm, each None without one, and its eps."""
    if norm is None:
        return (None,) * 5, 0.0
    return (norm.weight, norm.bias, norm.mean, norm.variance, norm.keep), norm.eps


def light_coefficients(pooled, layer, size) -> Saved:
    """See `Passes.light_coefficients`; averages are those of each span (spans, B, C)."""
    return base_coefficients(pooled, layer, None, softmax=False)


def base_coefficients(pooled, layer, earlier_keys, *, softmax=True) -> Saved:
    """See `Passes.base_coefficients`; averages are those of each span (spans, B, C)."""
    check_support(layer)
    weights, norm, heads = layer.weights, layer.frozen_norm, layer.heads
    spans, batch, channels = pooled.shape
    head_channels, depth = channels // heads, 1
    if earlier_keys is not None:
        earlier_keys = earlier_keys.float().contiguous()
        depth += earlier_keys.shape[1]
    size, new = (batch, channels), pooled.new_empty
    keys, scores = new(batch, depth, channels), new(batch, depth, heads)
    attention = Attention(pooled=new(size), query=new(size), keys=keys, scores=scores)
    coefficients = Coefficients(
        gain=None if softmax and norm is None else new(size),
        slope=new(size) if layer.has_history else None,
        offset=None if norm is None else new(size),
    )
    of_norm, eps = norm_tensors(norm)
    launch(
        coefficients_kernel, (batch, heads, 1),
        (pooled, weights.query, weights.key, weights.history_scale, *of_norm, earlier_keys),
        (attention.pooled, attention.query, keys, scores,
         coefficients.gain, coefficients.slope, coefficients.offset),
        (batch, spans, head_channels**-0.5, eps), channels, head_channels, depth,
        weights.query.shape[-1], softmax, next_power_of_2(head_channels), next_power_of_2(depth),
    )  # fmt: skip
    return Saved(attention, coefficients)


def light_coefficients_backward(saved, layer, size, sums) -> tuple[Tensor, Parameters]:
    """See `Passes.light_coefficients_backward`; the sums are those of each span of the grid."""
    return base_coefficients_backward(saved, layer, size, sums, sums, None, softmax=False)[:2]


def base_coefficients_backward(
    saved, layer, size, sums, output_sums, grad_keys, *, softmax=True
) -> tuple[Tensor, Parameters, Tensor | None]:
    """See `Passes.base_coefficients_backward`; the sums are those of each span of the grid.

    output_sums are the sums of the output's gradient: of base with each value, of light as sums.
    """
    check_support(layer)
    attention = saved.attention
    batch, depth, channels = attention.keys.shape
    heads, taps = layer.heads, sums.shape[2] - 2
    head_channels, blocks = channels // heads, ceil_div(channels, BLOCK_C)
    query, key, value, history_scale = layer.weights
    (weight, bias, mean, variance, keep), eps = norm_tensors(layer.frozen_norm)
    if grad_keys is not None:
        grad_keys = grad_keys.contiguous()
    has_norm = layer.frozen_norm is not None
    if layer.is_mla and has_norm:  # its sums of the output's gradient are in `sums`
        output_sums = output_sums.clone()
        output_sums[:, :, -1] = 0
        output_sums[0, :, -1] = sums[:, :, -1].sum(0)
    new = attention.keys.new_empty
    derived = new(batch, FIRST_TAP.value + taps, channels)
    grad_earlier = new(batch, depth - 1, channels) if depth > 1 else None
    launch(
        scores_backward_kernel, (batch, heads, 1),
        (output_sums, sums, attention.query, attention.keys, attention.scores, value,
         history_scale, weight, variance, keep, grad_keys), (derived, grad_earlier),
        (batch, len(output_sums), len(sums), head_channels**-0.5, eps),
        channels, head_channels, depth, taps, layer.has_history, has_norm, softmax,
        next_power_of_2(head_channels), next_power_of_2(depth),
    )  # fmt: skip
    grad_pixel, grad_projections = new(batch, channels), new(blocks, 2, *query.shape)
    learned = value, history_scale if layer.has_history else None, weight, bias
    gradients = [None if tensor is None else new(tensor.shape) for tensor in learned]
    launch(
        parameters_backward_kernel, (blocks, 1, 1),
        (derived, attention.pooled, None if softmax else saved.coefficients.gain, query, key,
         weight, mean, variance, keep), (grad_pixel, grad_projections, *gradients),
        (batch, size[2] * size[3], eps), channels,
        query.shape[-1], taps, min(BLOCK_B, next_power_of_2(batch)), BLOCK_C,
    )  # fmt: skip
    grad_projections = grad_projections[0] if blocks == 1 else grad_projections.sum(0)
    return grad_pixel, Parameters(*grad_projections, *gradients), grad_earlier
