"""The scores of MRLA-light and -base and their gradients as two Triton kernels.

`coefficients` does the same in some thirty small operations forward and fifty backward, whose
launches, not their work, a GPU would wait for at the batch sizes of detection.

    coefficients_kernel            pooled -> query, keys, scores, gain, slope and offset
    coefficients_backward_kernel   sums over the grid -> gradients of query, keys and parameters

They have a program per sample and head. What depends on other heads or samples comes in the next
launch, with the gradient of the map (see `PendingGradients`). What other kernels leave is a sum for
each span of the grid; here the spans are added up on the way. Everything is in float32.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrla_mm.ops.coefficients import Layer, Parameters, PixelGrad, Saved, project_both_transposed
from mrla_mm.ops.reference import BatchNorm
from mrla_mm.ops.triton.launch import SIZES, Unsupported, launch, next_power_of_2

MAX_KERNEL_SIZE = 16  # weights of the query or key convolution that the kernels can hold
NO_NORM = BatchNorm(weight=None, bias=None, mean=None, variance=None)


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
def load_root(variance_ptr, eps, channels, exists):
    """The deviations that a norm divides by, inverted; 1 without a norm."""
    if variance_ptr is None:
        return tl.full(channels.shape, 1.0, dtype=tl.float32)
    else:
        variance = tl.load(variance_ptr + channels, mask=exists, other=1.0).to(tl.float32)
        return tl.rsqrt(variance + eps)


@triton.jit
def sum_spans(pointer, places, exists, spans, stride):
    """Sum of what the programs of each span of the grid left, always in the same order."""
    BLOCK: tl.constexpr = places.shape[0]
    ROWS: tl.constexpr = 1024 // BLOCK if BLOCK < 1024 else 1  # spans that are loaded at a time
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, spans, ROWS):
        span = start + tl.arange(0, ROWS)[:, None]
        mask = (span < spans) & exists[None, :]
        total += tl.load(pointer + span * stride + places[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=SIZES)
def coefficients_kernel(
    averages_ptr, query_weight_ptr, key_weight_ptr, history_scale_ptr,
    norm_weight_ptr, norm_bias_ptr, mean_ptr, variance_ptr, keep_ptr, earlier_keys_ptr,
    pooled_ptr, query_ptr, keys_ptr, scores_ptr, gain_ptr, slope_ptr, offset_ptr,
    B, spans, logit_scale, eps, C, D, T,
    K: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`coefficients.Saved` of one sample and head, of base with SOFTMAX, else of light."""
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    exists = inner < D
    of_sample = sample * C + channels
    query = tl.zeros((BLOCK,), dtype=tl.float32)
    key = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        at = channels + k - K // 2
        mask = exists & (at >= 0) & (at < C)
        pooled = sum_spans(averages_ptr, sample * C + at, mask, spans, B * C)
        query += tl.load(query_weight_ptr + k).to(tl.float32) * pooled
        key += tl.load(key_weight_ptr + k).to(tl.float32) * pooled
        if k == K // 2:
            tl.store(pooled_ptr + of_sample, pooled, mask=exists)
    tl.store(query_ptr + of_sample, query, mask=exists)
    tl.store(keys_ptr + (sample * T + T - 1) * C + channels, key, mask=exists)
    score = tl.sum(tl.where(exists, query * key, 0.0), axis=0) * logit_scale
    layers = tl.arange(0, LANES)
    scores = tl.where(layers == T - 1, score, float("-inf"))
    if earlier_keys_ptr is not None:
        for s in range(T - 1):
            key = load(earlier_keys_ptr + (sample * (T - 1) + s) * C + channels, exists)
            tl.store(keys_ptr + (sample * T + s) * C + channels, key, mask=exists)
            scores = tl.where(layers == s, tl.sum(query * key, axis=0) * logit_scale, scores)
    keep = load_or(keep_ptr, sample, True, 1.0)
    norm_scale = load_or(norm_weight_ptr, channels, exists, 1.0)
    norm_scale *= load_root(variance_ptr, eps, channels, exists)
    factor = norm_scale * keep
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
        gain = factor
    else:
        scores = tl.sigmoid(scores)
        gain = factor * tl.sum(scores, axis=0)
    tl.store(scores_ptr + (sample * T + layers) * (C // D) + head, scores, mask=layers < T)
    if gain_ptr is not None:
        tl.store(gain_ptr + of_sample, gain, mask=exists)
    if slope_ptr is not None:
        slope = factor * load_or(history_scale_ptr, channels, exists, 1.0)
        tl.store(slope_ptr + of_sample, slope, mask=exists)
    if offset_ptr is not None:
        norm_bias = -load(mean_ptr + channels, exists) * norm_scale
        norm_bias += load_or(norm_bias_ptr, channels, exists, 0.0)
        tl.store(offset_ptr + of_sample, norm_bias * keep, mask=exists)


@triton.jit
def param_sizes(C, TAPS):
    """Sizes of grad_params: value's weight (C, TAPS), history scale, norm weight, norm bias."""
    return TAPS * C, C, C, C


@triton.jit(do_not_specialize=SIZES)
def coefficients_backward_kernel(
    sums_ptr, value_sums_ptr, pooled_ptr, query_ptr, keys_ptr, scores_ptr, gain_ptr,
    value_weight_ptr, history_scale_ptr, norm_weight_ptr, mean_ptr, variance_ptr, keep_ptr,
    grad_keys_ptr, grad_qk_ptr, grad_earlier_keys_ptr, grad_qk_weights_ptr, grad_params_ptr,
    B, value_spans, spans, logit_scale, eps, C, D, T,
    K: tl.constexpr, TAPS: tl.constexpr, HISTORY: tl.constexpr, MLA: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of one sample's and head's query, keys and parameters; of light without value_sums.

    `Passes` has the planes of sums (grid sums) and value sums, `param_sizes` the layout of
    grad_params. Nobody reads the part of a parameter that is absent.
    """
    sample, head = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    channels = head * D + inner
    exists = inner < D
    keep = load_or(keep_ptr, sample, True, 1.0)
    root = load_root(variance_ptr, eps, channels, exists)
    factor = keep * root * load_or(norm_weight_ptr, channels, exists, 1.0)
    query = load(query_ptr + sample * C + channels, exists)
    layers = tl.arange(0, LANES)
    scores = load(scores_ptr + (sample * T + layers) * (C // D) + head, layers < T)
    value_size, scale_size, weight_size, bias_size = param_sizes(C, TAPS)
    grad_value_ptr = grad_params_ptr + sample * (value_size + scale_size + weight_size + bias_size)
    grad_history_scale_ptr = grad_value_ptr + value_size
    grad_norm_weight_ptr = grad_history_scale_ptr + scale_size
    grad_norm_bias_ptr = grad_norm_weight_ptr + weight_size
    tap_places = sample * (TAPS + 2) * C + channels  # in a span of the grid sums
    history_places = tap_places + TAPS * C
    grad_places = history_places + C
    stride = B * (TAPS + 2) * C
    value_places = sample * (T + 1) * C + channels  # in a span of the value sums
    value_stride = B * (T + 1) * C
    gain = load_or(gain_ptr, sample * C + channels, exists, 1.0)
    grad_gain = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        total = sum_spans(sums_ptr, tap_places + tap * C, exists, spans, stride)
        grad_gain += total * load_or(value_weight_ptr, channels * TAPS + tap, exists, 1.0)
        tl.store(grad_value_ptr + channels * TAPS + tap, total * gain, mask=exists)
    grad_scores = tl.zeros((LANES,), dtype=tl.float32)
    grad_factor = tl.zeros((BLOCK,), dtype=tl.float32)
    if value_sums_ptr is None:
        grad_scores += tl.sum(grad_gain * factor, axis=0)
        grad_logits = grad_scores * scores * (1.0 - scores) * logit_scale
        grad_factor += grad_gain * tl.sum(scores, axis=0)
    else:
        for s in range(T):
            places = value_places + s * C
            total = sum_spans(value_sums_ptr, places, exists, value_spans, value_stride)
            grad_scores = tl.where(layers == s, tl.sum(total * factor, axis=0), grad_scores)
            grad_factor += tl.sum(tl.where(layers == s, scores, 0.0), axis=0) * total
        grad_logits = scores * (grad_scores - tl.sum(scores * grad_scores, axis=0)) * logit_scale
    if HISTORY:
        total = sum_spans(sums_ptr, history_places, exists, spans, stride)
        grad_factor += total * load_or(history_scale_ptr, channels, exists, 1.0)
        tl.store(grad_history_scale_ptr + channels, total * factor, mask=exists)
    if variance_ptr is not None:
        if value_sums_ptr is None or MLA:  # the norm comes after the convolution
            grad_offset = sum_spans(sums_ptr, grad_places, exists, spans, stride)
        else:
            places = value_places + T * C
            grad_offset = sum_spans(value_sums_ptr, places, exists, value_spans, value_stride)
        grad_scale = grad_factor - load(mean_ptr + channels, exists) * grad_offset
        tl.store(grad_norm_weight_ptr + channels, keep * root * grad_scale, mask=exists)
        tl.store(grad_norm_bias_ptr + channels, keep * grad_offset, mask=exists)
    grad_query = tl.zeros((BLOCK,), dtype=tl.float32)
    grad_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(T):  # the own key comes last, and its gradient stays
        grad_logit = tl.sum(tl.where(layers == s, grad_logits, 0.0), axis=0)
        of_layer = (sample * T + s) * C + channels
        grad_query += grad_logit * load(keys_ptr + of_layer, exists)
        grad_key = grad_logit * query + load_or(grad_keys_ptr, of_layer, exists, 0.0)
        if grad_earlier_keys_ptr is not None:
            of_earlier = (sample * (T - 1) + s) * C + channels
            is_earlier = (exists & (s < T - 1)) != 0  # Triton 3.9 interprets & as an integer
            tl.store(grad_earlier_keys_ptr + of_earlier, grad_key, mask=is_earlier)
    grad_query = tl.where(exists, grad_query, 0.0)
    grad_key = tl.where(exists, grad_key, 0.0)
    tl.store(grad_qk_ptr + sample * 2 * C + channels, grad_query, mask=exists)
    tl.store(grad_qk_ptr + (sample * 2 + 1) * C + channels, grad_key, mask=exists)
    grad_weights_ptr = grad_qk_weights_ptr + (sample * (C // D) + head) * 2 * K
    for k in tl.static_range(K):
        at = channels + k - K // 2
        pooled = load(pooled_ptr + sample * C + at, exists & (at >= 0) & (at < C))
        tl.store(grad_weights_ptr + k, tl.sum(grad_query * pooled, axis=0))
        tl.store(grad_weights_ptr + K + k, tl.sum(grad_key * pooled, axis=0))


@triton.jit
def project_transposed(grads_ptr, weight_ptr, channels, exists, C, K: tl.constexpr):
    """Convolve a sample's gradients over the channels (C,) with a weight turned round."""
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for k in tl.static_range(K):
        at = channels - k + K // 2
        near = exists & (at >= 0) & (at < C)
        total += load(weight_ptr + k, True) * load(grads_ptr + at, near)
    return total


@triton.jit
def finish_gradients(
    grad_qk_ptr, query_weight_ptr, key_weight_ptr, grad_params_ptr, grad_qk_weights_ptr,
    grad_params_sum_ptr, grad_qk_weights_sum_ptr, heads, params_size, channels, exists, C, pixels,
    K: tl.constexpr,
):  # fmt: skip
    """As `PendingGradients.finish`, without `known`; all programs of `stencil` share the sums."""
    grad_query_ptr = grad_qk_ptr + tl.program_id(0).to(tl.int64) * 2 * C
    grad_pooled = project_transposed(grad_query_ptr, query_weight_ptr, channels, exists, C, K)
    grad_pooled += project_transposed(grad_query_ptr + C, key_weight_ptr, channels, exists, C, K)
    BLOCK: tl.constexpr = channels.shape[0]
    B, group = tl.num_programs(0), tl.program_id(1)
    if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
        for start in range(group * BLOCK, params_size, tl.num_programs(1) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            mask = places < params_size
            total = sum_spans(grad_params_ptr, places, mask, B, params_size)
            tl.store(grad_params_sum_ptr + places, total, mask=mask)
        if group == 0:
            places = tl.arange(0, 32)  # of MAX_KERNEL_SIZE weights each
            mask = places < 2 * K
            total = sum_spans(grad_qk_weights_ptr, places, mask, B * heads, 2 * K)
            tl.store(grad_qk_weights_sum_ptr + places, total, mask=mask)
    return grad_pooled / pixels


@dataclass
class PendingGradients(PixelGrad):
    """What of a `PixelGrad` and parameters' gradients `stencil.convolve_backward` has to finish."""

    grad_qk: Tensor | None = None  # of query and own key (B, 2, C); None if nothing is left to do
    query_weight: Tensor | None = None  # of the convolution that makes it of averages (1, 1, K)
    key_weight: Tensor | None = None
    grad_params: Tensor | None = None  # of the other parameters by sample (B, params_size)
    grad_params_sum: Tensor | None = None  # that over the samples, to be written
    grad_qk_weights: Tensor | None = None  # of both weights by sample and head (B, heads, 2, K)
    grad_qk_weights_sum: Tensor | None = None  # that over samples and heads, to be written
    sizes: dict[str, int] = field(default_factory=lambda: dict(heads=0, params_size=0, K=0))
    pixels: int = 0  # of a map

    def finish(self) -> Tensor:
        """Do by torch what `finish_gradients` does, and add what is known."""
        torch.sum(self.grad_params, 0, out=self.grad_params_sum)
        self.grad_qk_weights_sum.view(2, -1).copy_(self.grad_qk_weights.sum((0, 1)))
        grad_pooled = project_both_transposed(self.grad_qk, self.query_weight, self.key_weight)
        grad_pixel = grad_pooled / self.pixels
        return grad_pixel if self.known is None else grad_pixel + self.known


def compile_key(shape: torch.Size, heads: int) -> tuple[int, ...]:
    """What of a map's shape these kernels are compiled for, and which offsets are not all 0."""
    batch, channels = shape[:2]
    return channels // heads, channels == 1, channels % 16 == 0, min(2, heads), min(2, batch)


def check_support(layer: Layer) -> None:
    """Raise `Unsupported` for a layer whose query and key are not short convolutions."""
    query = layer.weights.query
    if query is None or query.dim() != 3 or query.shape[-1] > MAX_KERNEL_SIZE:
        raise Unsupported


def light_coefficients(averages, layer, size) -> Saved:
    """See `Passes.light_coefficients`."""
    return base_coefficients(averages, layer, None, softmax=False)


def base_coefficients(averages, layer, earlier_keys, *, softmax=True) -> Saved:
    """See `Passes.base_coefficients`; without softmax those of light."""
    check_support(layer)
    weights, norm, heads = layer.weights, layer.frozen_norm or NO_NORM, layer.heads
    spans, batch, channels = averages.shape
    head_channels = channels // heads
    depth = 1
    if earlier_keys is not None:
        earlier_keys = earlier_keys.float().contiguous()
        depth += earlier_keys.shape[1]
    new = averages.new_empty
    saved = Saved(
        pooled=new(batch, channels),
        query=new(batch, channels),
        keys=new(batch, depth, channels),
        scores=new(batch, depth, heads),
        gain=None if softmax and not layer.fuses_norm else new(batch, channels),
        slope=new(batch, channels) if layer.has_history else None,
        offset=new(batch, channels) if layer.fuses_norm else None,
    )
    inputs = dict(
        averages_ptr=averages, query_weight_ptr=weights.query, key_weight_ptr=weights.key,
        history_scale_ptr=weights.history_scale,
        norm_weight_ptr=norm.weight, norm_bias_ptr=norm.bias, mean_ptr=norm.mean,
        variance_ptr=norm.variance, keep_ptr=norm.keep, earlier_keys_ptr=earlier_keys,
    )  # fmt: skip
    outputs = dict(
        pooled_ptr=saved.pooled, query_ptr=saved.query, keys_ptr=saved.keys,
        scores_ptr=saved.scores, gain_ptr=saved.gain, slope_ptr=saved.slope,
        offset_ptr=saved.offset,
    )  # fmt: skip
    numbers = dict(
        B=batch, spans=spans, logit_scale=head_channels**-0.5, eps=norm.eps,
        C=channels, D=head_channels, T=depth, K=weights.query.shape[-1], SOFTMAX=softmax,
        BLOCK=next_power_of_2(head_channels), LANES=next_power_of_2(depth),
    )  # fmt: skip
    launch(coefficients_kernel, (batch, heads, 1), inputs, outputs, numbers)
    return saved


def light_coefficients_backward(saved, layer, size, sums) -> tuple[PendingGradients, Parameters]:
    """See `Passes.light_coefficients_backward`."""
    return base_coefficients_backward(saved, layer, size, sums, None)[:2]


def base_coefficients_backward(
    saved, layer, size, sums, value_sums, *, grad_keys=None, grad_pooled=None
) -> tuple[PendingGradients, Parameters, Tensor | None]:
    """See `Passes.base_coefficients_backward`; without value sums those of light."""
    check_support(layer)
    batch, depth, channels = saved.keys.shape
    heads, taps = layer.heads, sums.shape[2] - 2
    head_channels = channels // heads
    query, key, value, history_scale = layer.weights
    norm = layer.frozen_norm or NO_NORM
    is_light = value_sums is None
    pixels = size[2:].numel()
    sizes = param_sizes.fn(channels, taps)
    params_size = sum(sizes)
    new = saved.keys.new_empty
    pending = PendingGradients(
        known=None if grad_pooled is None else grad_pooled.contiguous() / pixels,
        grad_qk=new(batch, 2, channels),
        query_weight=query,
        key_weight=key,
        grad_params=new(batch, params_size),
        grad_params_sum=new(params_size),
        grad_qk_weights=new(batch, heads, 2, query.shape[-1]),
        grad_qk_weights_sum=new(2, *query.shape),
        sizes=dict(heads=heads, params_size=params_size, K=query.shape[-1]),
        pixels=pixels,
    )
    grad_earlier_keys = new(batch, depth - 1, channels) if depth > 1 else None
    inputs = dict(
        sums_ptr=sums, value_sums_ptr=value_sums, pooled_ptr=saved.pooled,
        query_ptr=saved.query, keys_ptr=saved.keys, scores_ptr=saved.scores,
        gain_ptr=saved.gain if is_light else None,  # base's is of the weighted sum
        value_weight_ptr=value, history_scale_ptr=history_scale,
        norm_weight_ptr=norm.weight, mean_ptr=norm.mean, variance_ptr=norm.variance,
        keep_ptr=norm.keep, grad_keys_ptr=None if grad_keys is None else grad_keys.contiguous(),
    )  # fmt: skip
    outputs = dict(
        grad_qk_ptr=pending.grad_qk, grad_earlier_keys_ptr=grad_earlier_keys,
        grad_qk_weights_ptr=pending.grad_qk_weights, grad_params_ptr=pending.grad_params,
    )  # fmt: skip
    numbers = dict(
        B=batch, value_spans=0 if is_light else len(value_sums), spans=len(sums),
        logit_scale=head_channels**-0.5, eps=norm.eps, C=channels, D=head_channels, T=depth,
        K=query.shape[-1], TAPS=taps, HISTORY=layer.has_history, MLA=layer.is_mla,
        BLOCK=next_power_of_2(head_channels), LANES=next_power_of_2(depth),
    )  # fmt: skip
    launch(coefficients_backward_kernel, (batch, heads, 1), inputs, outputs, numbers)
    grads = pending.grad_params_sum.split_with_sizes(sizes)
    grad_value, grad_scale, grad_norm_weight, grad_norm_bias = grads
    grad_query, grad_key = pending.grad_qk_weights_sum.unbind()
    parameters = Parameters(
        query=grad_query,
        key=grad_key,
        value=None if value is None else grad_value.view(value.shape),
        history_scale=None if not layer.has_history or history_scale is None else grad_scale,
        norm_weight=None if norm.weight is None else grad_norm_weight,
        norm_bias=None if norm.bias is None else grad_norm_bias,
    )
    return pending, parameters, grad_earlier_keys
