"""Layer attention as linear functions of the maps: its coefficients, and gradients from grid sums.

With the scores A of a layer, the drop-path factor k, and a frozen batch norm of scale s and offset
t, the residual branch is

    light   y = x + k (s (A dw(x; W) + lambda p) + t) = x + gain dw(x; W) + slope p + shift
    base    y = x + k (s sum_s A_s v_s + t)           = x + gain sum_s A_s v_s + shift

    factor = k s,  slope = factor lambda,  shift = k t          per sample and channel
    gain = factor A for light, factor for base

where dw is the depthwise convolution and p the history. Backward needs sums over the grid alone: of
grad times each shifted x, or times each value, of grad times p, and of grad. With these, of light

    d gain = sum grad dw(x) = sum_i W_i sum grad x_i    x_i: x shifted to place i of the kernel
    d W_i = sum_B gain sum grad x_i
    d A = factor d gain,  d slope = sum grad p,  d lambda = sum_B factor d slope
    d factor = A d gain + lambda d slope,  d shift = sum grad

Everything here is small and at least in single precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.reference import (
    FrozenNorm,
    Weights,
    at_least_float32,
    frozen_bn_affine,
    light_gate,
    softmax_scores,
    split_heads,
)


class Parameters(NamedTuple):
    """Weights and norm of a layer, or their gradients, as an autograd Function takes them: flat."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    history_scale: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def pack(cls, weights: Weights, norm: FrozenNorm | None) -> "Parameters":
        """All tensors of both."""
        return cls(*weights) if norm is None else cls(*weights, *norm[:-1])  # all but eps


class Layer(NamedTuple):
    """What a layer computes with: its parameters, the norm behind it, G, whether it has history."""

    weights: Weights
    norm: FrozenNorm | None
    heads: int
    has_history: bool = False

    def take(self, samples: slice | None) -> "Layer":
        """The layer for some samples: with their drop-path factors."""
        if samples is None or self.norm is None or self.norm.keep is None:
            return self
        return self._replace(norm=self.norm._replace(keep=self.norm.keep[samples]))


class State(NamedTuple):
    """Coefficients of a layer's attention, and what its backward needs.

    pooled (B, C); query (B, E); keys of the stage's layers so far (B, T, E), T = 1 for light;
    scores (B, T, G); gain, slope and shift (B, C). None stands for what is absent: a gain or slope
    of 1, a shift of 0.
    """

    pooled: Tensor | None = None
    query: Tensor | None = None
    keys: Tensor | None = None
    scores: Tensor | None = None
    gain: Tensor | None = None
    slope: Tensor | None = None
    shift: Tensor | None = None


class GridSums(NamedTuple):
    """Sums over the grid of a gradient times other maps; None where not needed.

    value (B, C, n): times x shifted to each of the n places under the value's kernel; history
    (B, C): times the history; grad (B, C): of the gradient itself.
    """

    value: Tensor
    history: Tensor | None = None
    grad: Tensor | None = None


def take(samples: slice | None, *tensors: Tensor | None) -> Sequence[Tensor | None]:
    """Some samples of each tensor; all for None."""
    if samples is None:
        return tensors
    return [None if tensor is None else tensor[samples] for tensor in tensors]


def cat(chunks: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of those of all chunks of the batch."""
    return chunks[0] if len(chunks) == 1 or chunks[0] is None else torch.cat(chunks)


def cat_chunks(states: Sequence[State]) -> State:
    """State of all samples from those of chunks of the batch."""
    return State(*map(cat, zip(*states, strict=True)))


def sum_chunks(gradients: Sequence[Parameters]) -> Parameters:
    """Gradients of parameters, summed over chunks of the batch."""
    fields = zip(*gradients, strict=True)
    return Parameters(*(None if field[0] is None else sum(field[1:], field[0]) for field in fields))


def product(*factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are not None, or None."""
    result = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else result * factor
    return result


def norm_coefficients(
    norm: FrozenNorm | None, size: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Factor keep s and shift keep t of a norm (B, C), at least float32; None each without one."""
    if norm is None:
        return None, None
    scale, offset = frozen_bn_affine(norm.mean, norm.variance, norm.weight, norm.bias, norm.eps)
    keep = None if norm.keep is None else norm.keep.unsqueeze(1)
    return product(scale, keep).expand(size), product(offset, keep).expand(size)


def expand_scores(scores: Tensor, channels: int) -> Tensor:
    """Repeat scores over the channels of their heads: (B, T, G) -> (B, T, C)."""
    return scores.unsqueeze(-1).expand(-1, -1, -1, channels // scores.shape[2]).flatten(2)


def project_both(pooled: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Query and key (B, E) of pooled channels (B, C), by one operation."""
    both = torch.cat((weights.query, weights.key)).to(pooled.dtype)  # (2, 1, k) or (2 E, C)
    if both.dim() == 2:
        return F.linear(pooled, both).chunk(2, 1)
    return F.conv1d(pooled.unsqueeze(1), both, padding=both.shape[-1] // 2).unbind(1)


def project_both_backward(
    pooled: Tensor, weights: Weights, grad_query: Tensor, grad_key: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Gradients of pooled (B, C), and of the weights of query and key."""
    both = torch.cat((weights.query, weights.key)).to(pooled.dtype)
    if both.dim() == 2:
        flat = torch.cat((grad_query, grad_key), 1)
        return flat @ both, (flat.T @ pooled).chunk(2)
    grad_pooled, grad_both, _ = torch.ops.aten.convolution_backward(
        torch.stack((grad_query, grad_key), 1), pooled.unsqueeze(1), both, None,
        [1], [both.shape[-1] // 2], [1], False, [0], 1, [True, True, False],
    )  # fmt: skip
    return grad_pooled.squeeze(1), grad_both.chunk(2)


def light_state(x: Tensor, pooled: Tensor | None, layer: Layer) -> State:
    """State of MRLA-light for a map (B, C, H, W), whose averages (B, C) are None without a gate."""
    weights, norm, heads, has_history = layer
    size = x.shape[:2]
    factor, shift = norm_coefficients(norm, size)
    query = keys = scores = gate = slope = None
    if pooled is not None:
        query, key = project_both(pooled, weights)
        keys = key.unsqueeze(1)
        scores = light_gate(split_heads(query, heads), split_heads(key, heads)).unsqueeze(1)
        gate = expand_scores(scores, size[1]).squeeze(1)
    if has_history:
        slope = product(at_least_float32(weights.history_scale), factor)
    if slope is not None:
        slope = slope.expand(size)
    return State(pooled, query, keys, scores, product(gate, factor), slope, shift)


def base_state(pooled: Tensor, layer: Layer, earlier: Tensor | None) -> State:
    """State of MRLA-base for averages (B, C) and the earlier layers' keys (B, T - 1, E) or None."""
    weights, norm, heads, _ = layer
    factor, shift = norm_coefficients(norm, pooled.shape)
    query, key = project_both(pooled, weights)
    keys = key.unsqueeze(1)
    if earlier is not None:
        keys = torch.cat((earlier, keys), 1)
    keys_of_heads = [split_heads(key, heads) for key in keys.unbind(1)]
    scores = softmax_scores(split_heads(query, heads), keys_of_heads).transpose(1, 2)  # (B, T, G)
    return State(pooled, query, keys, scores, factor, None, shift)


def light_backward(
    x: Tensor, state: State, layer: Layer, sums: GridSums
) -> tuple[Tensor | None, Parameters]:
    """Gradients of MRLA-light that follow from the sums of its output's gradient.

    Returns:
        What the gate adds to the gradient of every pixel of x (B, C), None without a gate; and the
        gradients of the parameters, summed over the samples.
    """
    weights, norm, heads, _ = layer
    factor, _ = norm_coefficients(norm, x.shape[:2])
    grad_pixel = grad_query = grad_key = grad_value = grad_history_scale = None
    grad_gain = sums.value[..., 0]  # (B, C), where there is no convolution and dw(x) is x
    if weights.value is not None:
        grad_gain = (sums.value * at_least_float32(weights.value).flatten(1)).sum(-1)
        gain = None if state.gain is None else state.gain.unsqueeze(-1)
        grad_value = product(sums.value, gain).sum(0).view_as(weights.value)
    grad_factor = grad_gain
    if state.scores is not None:
        grad_factor = grad_gain * expand_scores(state.scores, x.shape[1]).squeeze(1)
        grad_gate = sum_heads(product(grad_gain, factor).unsqueeze(1), heads)
        grad_scores = torch.ops.aten.sigmoid_backward(grad_gate, state.scores)
        grad_pixel, grad_query, grad_key, _ = scores_backward(x, state, weights, grad_scores, None)
    if sums.history is not None:
        history_scale = at_least_float32(weights.history_scale)
        grad_factor = grad_factor + product(sums.history, history_scale)
        if history_scale is not None:
            grad_history_scale = product(sums.history, factor).sum(0)
    grad_norm = norm_backward(norm, grad_factor, sums.grad)
    gradients = Parameters(grad_query, grad_key, grad_value, grad_history_scale, *grad_norm)
    return grad_pixel, gradients


def base_backward(
    x: Tensor,
    state: State,
    layer: Layer,
    sums: GridSums,
    value_sums: Tensor,
    grad_keys: Tensor | None,
) -> tuple[Tensor, Parameters, Tensor | None]:
    """Gradients of MRLA-base that follow from sums over the grid.

    `sums` are those of the gradient of the layer's own value; `value_sums` (B, T + 1, C) of the
    output's gradient times each value and, last, of that gradient itself; `grad_keys` (B, T, E) is
    what later layers make of the keys. Returns what `light_backward` does, and the gradient of the
    earlier keys (B, T - 1, E), None for T = 1.
    """
    weights, norm, heads, _ = layer
    factor, _ = norm_coefficients(norm, x.shape[:2])
    scores = state.scores
    grad_gain = value_sums[:, :-1]  # (B, T, C), of factor times score
    grad_factor = (grad_gain * expand_scores(scores, x.shape[1])).sum(1)
    grad_norm = norm_backward(norm, grad_factor, value_sums[:, -1])
    if factor is not None:
        grad_gain = grad_gain * factor.unsqueeze(1)
    grad_softmax = sum_heads(grad_gain, heads)
    grad_scores = scores * (grad_softmax - (scores * grad_softmax).sum(1, keepdim=True))
    grad_pixel, grad_query, grad_key, grad_earlier = scores_backward(
        x, state, weights, grad_scores, grad_keys
    )
    grad_value = sums.value.sum(0).view_as(weights.value)
    gradients = Parameters(grad_query, grad_key, grad_value, None, *grad_norm)
    return grad_pixel, gradients, grad_earlier


def sum_heads(per_channel: Tensor, heads: int) -> Tensor:
    """Sum over the channels of each head: (B, T, C) -> (B, T, G)."""
    return per_channel.unflatten(2, (heads, -1)).sum(-1)


def scores_backward(
    x: Tensor, state: State, weights: Weights, grad_scores: Tensor, grad_keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients behind the scores q . k / sqrt(D), before the sigmoid or softmax.

    Shapes: grad_scores (B, T, G), grad_keys from later layers (B, T, E) or None -> gradient of
    every pixel of x through its average (B, C), of the weights of query and key, and of the earlier
    keys (B, T - 1, E) or None.
    """
    heads, length = state.scores.shape[2], state.keys.shape[2]
    grad_products = expand_scores(grad_scores * (length // heads) ** -0.5, length)  # (B, T, E)
    grad_query = (grad_products * state.keys).sum(1)
    of_keys = grad_products * state.query.unsqueeze(1)
    if grad_keys is not None:
        of_keys = of_keys + grad_keys
    grad_pooled, (grad_query_weight, grad_key_weight) = project_both_backward(
        state.pooled, weights, grad_query, of_keys[:, -1]
    )
    grad_pixel = grad_pooled / (x.shape[2] * x.shape[3])
    grad_earlier = of_keys[:, :-1] if of_keys.shape[1] > 1 else None
    return grad_pixel, grad_query_weight, grad_key_weight, grad_earlier


def norm_backward(
    norm: FrozenNorm | None, grad_factor: Tensor, grad_sum: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a norm's weight and bias (C,).

    Shapes: grad_factor, the gradient of scale times keep, and grad_sum, that of shift: (B, C).
    """
    if norm is None:
        return None, None
    keep = None if norm.keep is None else norm.keep.unsqueeze(1)
    grad_scale = product(grad_factor, keep).sum(0)
    grad_bias = product(grad_sum, keep).sum(0)
    root = torch.rsqrt(at_least_float32(norm.variance) + norm.eps)
    grad_weight = root * (grad_scale - norm.mean * grad_bias)
    return None if norm.weight is None else grad_weight, None if norm.bias is None else grad_bias
