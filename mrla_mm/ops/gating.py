"""What surrounds the feature maps in a fused layer attention: small tensors, forward and backward by hand.

With gate A, drop-path factor k, normalisation scale s and offset t, the branch is one linear function of the maps,

    y = x + k (s (A dw(x; W) + lambda p) + t) = x + dw(x; taps) + slope p + shift
    taps = k s A W,  slope = k s lambda,  shift = k t           per sample and channel

so backward needs of the maps only sums over the grid: of grad times each shifted x, of grad times p, and of grad.
Everything here is computed in at least single precision.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.reference import light_gate, project, split_heads


class Affine(NamedTuple):
    """What the residual branch does with an attention's output o: y = x + keep (scale o + offset).

    scale and offset (C,) are a normalisation with frozen statistics; keep (B,) is the factor of each sample's drop
    path, or None for 1. keep takes no gradient.
    """

    scale: Tensor
    offset: Tensor
    keep: Tensor | None = None


class LightWeights(NamedTuple):
    """Parameters of MRLA-light; None stands for what a variant lacks.

    query and key (1, 1, k) or (E, C), without which the gate is 1; value (C, 1, 3, 3), without which v = x;
    history_scale (C,), without which lambda = 1.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    history_scale: Tensor | None = None


class Coefficients(NamedTuple):
    """The linear function of the maps: taps (B, C, n), n = 9 or 1; slope and shift (B or 1, C) or None for 0."""

    taps: Tensor
    slope: Tensor | None
    shift: Tensor | None


class MapSums(NamedTuple):
    """Sums over the grid: of grad times shifted x (B, C, n), of grad times p and of grad (B, C), None if not needed."""

    taps: Tensor
    slope: Tensor | None
    shift: Tensor | None


def wide(tensor: Tensor | None) -> Tensor | None:
    """Tensor in at least single precision."""
    return None if tensor is None else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def times(*factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are there, or None."""
    product = None
    for factor in factors:
        if factor is not None:
            product = factor if product is None else product * factor
    return product


def per_sample(keep: Tensor | None) -> Tensor | None:
    """Factors of the samples in a shape that multiplies (B, C): (B,) -> (B, 1)."""
    return None if keep is None else keep.unsqueeze(1)


def channel_gate(gate: Tensor | None, channels: int) -> Tensor | None:
    """Repeat a gate over the channels of its head: (B, G) -> (B, C)."""
    return None if gate is None else gate.repeat_interleave(channels // gate.shape[1], dim=1)


def pooled_gate(pooled: Tensor, weights: LightWeights, heads: int) -> Tensor | None:
    """Gate of pooled channels: (B, C) -> (B, G), None without query and key."""
    if weights.query is None:
        return None
    query, key = (split_heads(project(pooled, weight), heads) for weight in (weights.query, weights.key))
    return light_gate(query, key)


def fold_light(
    x: Tensor, gate: Tensor | None, weights: LightWeights, affine: Affine | None, *, history: bool
) -> Coefficients:
    """Fold gate, weights and normalisation into one linear function of x (B, C, H, W) and, with history, of p."""
    gain = light_gain(x, gate, affine)  # (B or 1, C)
    taps = gain.unsqueeze(-1)
    if weights.value is not None:
        taps = taps * wide(weights.value).flatten(1)  # (B, C, 9)
    taps = taps.expand(x.shape[0], -1, -1).contiguous()
    shift = None
    if affine is not None:
        shift = torch.atleast_2d(times(wide(affine.offset), per_sample(affine.keep)))
    return Coefficients(taps, fold_slope(x, weights, affine) if history else None, shift)


def fold_slope(x: Tensor, weights: LightWeights, affine: Affine | None) -> Tensor:
    """Factor of the history, keep scale lambda: (B or 1, C)."""
    scale, _, keep = affine or (None, None, None)
    slope = times(wide(weights.history_scale), wide(scale), per_sample(keep))
    if slope is None:
        return torch.ones(1, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return torch.atleast_2d(slope)


def light_gain(x: Tensor, gate: Tensor | None, affine: Affine | None) -> Tensor:
    """Factor of the value, keep scale gate: (B or 1, C)."""
    one = torch.ones(1, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if affine is None:
        return times(one, channel_gate(gate, x.shape[1]))
    return times(one, channel_gate(gate, x.shape[1]), wide(affine.scale), per_sample(affine.keep))


def unfold_light(
    x: Tensor,
    pooled: Tensor | None,
    gate: Tensor | None,
    weights: LightWeights,
    affine: Affine | None,
    sums: MapSums,
) -> tuple[Tensor | None, LightWeights, Tensor | None, Tensor | None]:
    """Gradients that follow from the sums over the grid.

    Returns:
        What the gate adds to every position of the gradient of x (B, C); the gradients of the weights, of the scale
        and of the offset; None for what is absent.
    """
    scale, _, keep = affine or (None, None, None)
    scale, keep = wide(scale), per_sample(keep)
    if weights.value is None:
        by_gain, value = sums.taps[..., 0], None  # (B, C)
    else:
        by_gain = (sums.taps * wide(weights.value).flatten(1)).sum(-1)
        value = (light_gain(x, gate, affine).unsqueeze(-1) * sums.taps).sum(0).view(weights.value.shape)
    history_scale = None if weights.history_scale is None else times(sums.slope, scale, keep).sum(0)
    by_scale = by_offset = None
    if scale is not None:
        by_scale = times(by_gain, channel_gate(gate, x.shape[1]))
        if sums.slope is not None:
            by_scale = by_scale + times(sums.slope, wide(weights.history_scale))
        by_scale = times(by_scale, keep).sum(0)
        by_offset = times(sums.shift, keep).sum(0)
    constant = query = key = None
    if gate is not None:
        by_gate = times(by_gain, scale, keep).unflatten(1, (gate.shape[1], -1)).sum(-1)  # (B, G)
        by_pooled, query, key = gate_gradients(pooled, gate, weights, by_gate)
        constant = by_pooled / (x.shape[2] * x.shape[3])
    return constant, LightWeights(query, key, value, history_scale), by_scale, by_offset


def gate_gradients(pooled: Tensor, gate: Tensor, weights: LightWeights, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of pooled, query and key weight from that of the gate, sigmoid(q . k / sqrt(D)) (B, G)."""
    query, key = (split_heads(project(pooled, weight), gate.shape[1]) for weight in (weights.query, weights.key))
    by_score = (grad * gate * (1 - gate) * query.shape[-1] ** -0.5).unsqueeze(-1)  # (B, G, 1)
    by_pooled, by_query = project_gradients(pooled, weights.query, (by_score * key).flatten(1))
    more, by_key = project_gradients(pooled, weights.key, (by_score * query).flatten(1))
    return by_pooled + more, by_query, by_key


def project_gradients(pooled: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of pooled (B, C) and weight from that of `project`'s output (B, C) or (B, E)."""
    weight = weight.to(pooled.dtype)
    if weight.dim() == 2:
        return grad @ weight, grad.T @ pooled
    size = weight.shape[-1]
    windows = F.pad(pooled, (size // 2, size // 2)).unfold(1, size, 1)  # (B, C, k)
    by_weight = (windows * grad.unsqueeze(-1)).sum((0, 1)).view(1, 1, size)
    return project(grad, weight.flip(-1)), by_weight
