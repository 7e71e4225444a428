"""Layer attention as linear functions of the maps: their coefficients, and how gradients follow from grid sums.

With the scores A of a layer, the drop-path factor k, and a frozen batch norm of scale s and offset
t, the residual branch is

    light   y = x + k (s (A dw(x; W) + lambda p) + t) = x + gain dw(x; W) + slope p + shift
    base    y = x + k (s sum_s A_s v_s + t)           = x + gain sum_s A_s v_s + shift

    gain = k s [A],  slope = k s lambda,  shift = k t           per sample and channel

where dw is the depthwise convolution and p the history. Backward needs sums over the grid alone: of
grad times each shifted x, or times each value, of grad times p, and of grad. Everything here is
small and at least in single precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.reference import at_least_float32, frozen_bn_affine, light_gate, softmax_scores


class FrozenNorm(NamedTuple):
    """What the residual branch does with an attention's output o: y = x + keep norm(o).

    The norm is a batch norm with frozen statistics; weight and bias (C,) may be None, mean and
    variance (C,) take no gradient. keep (B,) is the drop-path factor of each sample, or None for 1,
    and takes none either.
    """

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    keep: Tensor | None = None
    eps: float = 1e-5


class Weights(NamedTuple):
    """Parameters of an attention; None stands for what a variant lacks.

    query and key (1, 1, k) or (E, C), without which the gate is 1; value (C, 1, 3, 3), without
    which v = x; history_scale (C,), without which lambda = 1.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    history_scale: Tensor | None = None


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
    """Sums over the grid: of grad times shifted x (B, C, n), of grad times p and of grad (B, C), None if not needed."""

    taps: Tensor
    slope: Tensor | None = None
    shift: Tensor | None = None


def take(
    tensors: Tensor | State | FrozenNorm | None, samples: slice | None
) -> Tensor | State | FrozenNorm | None:
    """Some samples of a tensor, of each of several, or of a norm's drop-path factors; samples=None: all of them."""
    if tensors is None or samples is None:
        return tensors
    if isinstance(tensors, FrozenNorm):
        return tensors._replace(keep=take(tensors.keep, samples))
    return (
        State(*(take(tensor, samples) for tensor in tensors))
        if isinstance(tensors, State)
        else tensors[samples]
    )


def cat_chunks(chunks: Sequence[State]) -> State:
    """Tensors of all samples from those of parts of the batch."""
    if len(chunks) == 1:
        return chunks[0]
    return State(
        *(None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True))
    )


def product(*factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are not None, or None."""
    found = None
    for factor in factors:
        if factor is not None:
            found = factor if found is None else found * factor
    return found


def unpack_norm(norm: FrozenNorm | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale and offset (C,) in at least single precision, keep (B, 1); None each without a norm."""
    if norm is None:
        return None, None, None
    scale, offset = frozen_bn_affine(norm.mean, norm.variance, norm.weight, norm.bias, norm.eps)
    return scale, offset, None if norm.keep is None else norm.keep.unsqueeze(1)


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


def attention_state(
    x: Tensor, pooled: Tensor | None, weights: Weights, norm: FrozenNorm | None,
    *, heads: int, softmax: bool, has_history: bool = False, earlier: Tensor | None = None,
) -> State:  # fmt: skip
    """State of a layer.

    Args:
        x: its map (B, C, H, W).
        pooled: its channels' averages (B, C); None for a light attention without a gate.
        weights: its parameters.
        norm: the norm behind it.
        heads: G.
        softmax: the scores are those of base, else of light.
        has_history: whether there is a history to scale.
        earlier: keys (B, T - 1, E) of the stage's earlier layers, for base.
    """
    scale, offset, keep = unpack_norm(norm)
    query = keys = scores = gates = None
    if pooled is not None:
        query, key = project_both(pooled, weights)
        keys = key.unsqueeze(1) if earlier is None else torch.cat((earlier, key.unsqueeze(1)), 1)
        split = [part.unflatten(1, (heads, -1)) for part in (query, *keys.unbind(1))]
        if softmax:
            scores = softmax_scores(split[0], split[1:]).transpose(1, 2)  # (B, T, G)
        else:
            scores = light_gate(*split).unsqueeze(1)  # (B, 1, G)
            gates = expand_scores(scores, x.shape[1]).squeeze(1)
    slope = product(at_least_float32(weights.history_scale), scale, keep) if has_history else None
    factors = product(gates, scale, keep), slope, product(offset, keep)
    return State(
        pooled,
        query,
        keys,
        scores,
        *(None if f is None else f.expand(x.shape[:2]) for f in factors),
    )


def attention_backward(
    x: Tensor, state: State, weights: Weights, norm: FrozenNorm | None, taps: GridSums, sums: Tensor | None = None,
    grad_keys: Tensor | None = None, *, softmax: bool,
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:  # fmt: skip
    """Gradients that follow from the sums over the grid.

    Args:
        x: map (B, C, H, W) of the layer.
        state: its state.
        weights: its parameters.
        norm: the norm behind it.
        taps: sums of grad, of light, or of the own value's gradient, of base.
        sums: for base, those of grad times each value and, last, of grad (B, T + 1, C).
        grad_keys: gradient of the keys (B, T, E) from later layers.
        softmax: the scores are those of base, else of light.

    Returns:
        What the scores add to the gradient of every position of x (B, C); the gradients of the four
        weights and of the norm's weight and bias, summed over the samples; the gradient of the
        earlier keys. None for what is absent.
    """
    (scale, _, keep), scores, keys = unpack_norm(norm), state.scores, state.keys
    constant = grad_query = grad_key = grad_value = grad_history = None
    by_score = (
        taps.taps[..., :1].transpose(1, 2) if sums is None else sums[:, :-1]
    )  # (B, T, C), gradient of gain
    if weights.value is not None:
        gain = None if softmax or state.gain is None else state.gain.unsqueeze(-1)
        grad_value = product(taps.taps, gain).sum(0).view_as(weights.value)
        if sums is None:
            by_score = (taps.taps * at_least_float32(weights.value).flatten(1)).sum(-1).unsqueeze(1)
    grad_factor = (
        by_score.squeeze(1)
        if scores is None
        else (by_score * expand_scores(scores, x.shape[1])).sum(1)
    )
    if scores is not None:
        heads, width = scores.shape[2], keys.shape[2] // scores.shape[2]
        factor = product(scale, keep)  # (C,), (B, C), or None
        by_score = product(
            by_score, factor if factor is None or factor.dim() == 1 else factor.unsqueeze(1)
        )
        grad_scores = by_score.unflatten(2, (heads, -1)).sum(-1)  # (B, T, G)
        if softmax:
            grad_scores = scores * (grad_scores - (scores * grad_scores).sum(1, keepdim=True))
        else:
            grad_scores = torch.ops.aten.sigmoid_backward(grad_scores, scores)
        grad_scores = expand_scores(grad_scores * width**-0.5, keys.shape[2])  # (B, T, E)
        found = grad_scores * state.query.unsqueeze(1)
        grad_keys = found if grad_keys is None else found + grad_keys
        constant, (grad_query, grad_key) = project_both_backward(
            state.pooled, weights, (grad_scores * keys).sum(1), grad_keys[:, -1]
        )
        constant = constant / (x.shape[2] * x.shape[3])
    if taps.slope is not None:
        history_scale = at_least_float32(weights.history_scale)
        grad_factor = grad_factor + product(taps.slope, history_scale)
        if history_scale is not None:
            grad_history = product(product(taps.slope, keep).sum(0), scale)
    of_norm = norm_backward(norm, grad_factor, taps.shift if sums is None else sums[:, -1])
    earlier = grad_keys[:, :-1] if softmax and keys.shape[1] > 1 else None
    return constant, [grad_query, grad_key, grad_value, grad_history, *of_norm], earlier


def norm_backward(
    norm: FrozenNorm | None, grad_factor: Tensor, grad_sum: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of a norm's weight and bias (C,) from those of scale times keep and of shift, (B, C) each."""
    if norm is None:
        return None, None
    keep = None if norm.keep is None else norm.keep.unsqueeze(1)
    grad_scale, grad_bias = (product(part, keep).sum(0) for part in (grad_factor, grad_sum))
    return torch.rsqrt(at_least_float32(norm.variance) + norm.eps) * (
        grad_scale - norm.mean * grad_bias
    ), grad_bias
