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

from mrla_mm.ops.reference import light_gate

NARROW = (torch.float16, torch.bfloat16)


class Affine(NamedTuple):
    """What the residual branch does with an attention's output o: y = x + keep (scale o + offset).

    scale and offset (C,) are a normalisation with frozen statistics; keep (B,) is the factor of each sample's drop
    path, or None for 1. keep takes no gradient.
    """

    scale: Tensor
    offset: Tensor
    keep: Tensor | None = None

    def of(self, samples: slice) -> "Affine":
        """That of some samples."""
        return self._replace(keep=None if self.keep is None else self.keep[samples])


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

    def of(self, samples: slice) -> "Coefficients":
        """Those of some samples."""
        return Coefficients(*(t if t is None or t.shape[0] == 1 else t[samples] for t in self))


class MapSums(NamedTuple):
    """Sums over the grid: of grad times shifted x (B, C, n), of grad times p and of grad (B, C), None if not needed."""

    taps: Tensor
    slope: Tensor | None
    shift: Tensor | None


def wide(tensor: Tensor | None) -> Tensor | None:
    """Tensor in at least single precision."""
    return tensor.float() if tensor is not None and tensor.dtype in NARROW else tensor


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
    return None if gate is None else gate.unsqueeze(2).expand(-1, -1, channels // gate.shape[1]).flatten(1)


def as_rows(per_channel: Tensor | None) -> Tensor | None:
    """Numbers that all samples share as those of one: (C,) -> (1, C); (B, C) as it is."""
    return per_channel.unsqueeze(0) if per_channel is not None and per_channel.dim() == 1 else per_channel


class Gate(NamedTuple):
    """Gate of light attention and what its backward needs: pooled (B, C), query and key (B, 2, E), gate (B, G)."""

    pooled: Tensor | None = None
    projected: Tensor | None = None
    gate: Tensor | None = None

    def of(self, samples: slice) -> "Gate":
        """That of some samples."""
        return Gate(*(None if t is None else t[samples] for t in self))


def both_weights(weights: LightWeights, pooled: Tensor) -> Tensor:
    """Weights of query and key in one: (2, 1, k) or (2 E, C)."""
    return torch.cat((weights.query, weights.key)).to(pooled.dtype)


def pooled_gate(pooled: Tensor, weights: LightWeights, heads: int) -> Gate:
    """Gate of pooled channels (B, C); query and key are one operation."""
    both = both_weights(weights, pooled)
    if both.dim() == 2:
        projected = F.linear(pooled, both).unflatten(1, (2, -1))  # (B, 2, E)
    else:
        projected = F.conv1d(pooled.unsqueeze(1), both, padding=both.shape[-1] // 2)  # (B, 2, C)
    query, key = projected.unflatten(2, (heads, -1)).unbind(1)
    return Gate(pooled, projected, light_gate(query, key))


def light_gain(gate: Tensor | None, affine: Affine | None, channels: int) -> Tensor | None:
    """Factor of the value, keep scale gate: (B or 1, C), or None for 1."""
    scale, _, keep = affine or (None, None, None)
    return as_rows(times(channel_gate(gate, channels), wide(scale), per_sample(keep)))


def fold_light(
    x: Tensor, gain: Tensor | None, weights: LightWeights, affine: Affine | None, *, history: bool
) -> Coefficients:
    """Fold gain, weights and normalisation into one linear function of x (B, C, H, W) and, with history, of p."""
    taps = None if gain is None else gain.unsqueeze(-1)  # (B or 1, C, 1)
    if weights.value is not None:
        taps = times(wide(weights.value).flatten(1), taps)  # (B or 1, C, 9) or (C, 9)
    elif taps is None:
        taps = torch.ones(1, 1, 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    taps = taps.expand(*x.shape[:2], -1).contiguous()
    shift = None if affine is None else as_rows(times(wide(affine.offset), per_sample(affine.keep)))
    return Coefficients(taps, fold_slope(x, weights, affine) if history else None, shift)


def fold_slope(x: Tensor, weights: LightWeights, affine: Affine | None) -> Tensor:
    """Factor of the history, keep scale lambda: (B or 1, C)."""
    scale, _, keep = affine or (None, None, None)
    slope = times(wide(weights.history_scale), wide(scale), per_sample(keep))
    if slope is None:
        return torch.ones(1, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return as_rows(slope)


def unfold_light(
    x: Tensor, gate: Gate, gain: Tensor | None, weights: LightWeights, affine: Affine | None, sums: MapSums
) -> tuple[Tensor | None, LightWeights, Tensor | None, Tensor | None]:
    """Gradients that follow from the sums over the grid.

    Returns:
        What the gate adds to every position of the gradient of x (B, C); the gradients of the weights, of the scale
        and of the offset; None for what is absent.
    """
    by_gain, constant, by_projected = gain_gradient(weights, sums.taps), None, None
    if gate.gate is not None:
        constant, by_projected = gate_gradients(x, gate, weights, affine, by_gain)
    return constant, *parameter_gradients(gate, gain, weights, affine, sums, by_gain, by_projected)


def gain_gradient(weights: LightWeights, by_taps: Tensor) -> Tensor:
    """Gradient of the gain, the factor of the value, from that of the taps: (B, C, n) -> (B, C)."""
    return by_taps[..., 0] if weights.value is None else (by_taps * wide(weights.value).flatten(1)).sum(-1)


def gate_gradients(
    x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, by_gain: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient that reaches every position of x through the gate (B, C), and that of query and key (B, 2, E)."""
    scale, _, keep = affine or (None, None, None)
    _, projected, gates = gate
    by_gate = times(by_gain, wide(scale), per_sample(keep)).unflatten(1, (gates.shape[1], -1)).sum(-1)  # (B, G)
    heads = projected.flip(1).unflatten(2, (gates.shape[1], -1))  # key, then query: (B, 2, G, D)
    by_score = torch.ops.aten.sigmoid_backward(by_gate, gates) * heads.shape[-1] ** -0.5  # (B, G)
    by_projected = (by_score[:, None, :, None] * heads).flatten(2)
    by_pooled = projection_backward(gate, weights, by_projected, (True, False))[0]
    return by_pooled / (x.shape[2] * x.shape[3]), by_projected


def projection_backward(
    gate: Gate, weights: LightWeights, by_projected: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the pooled channels (B, C) and of both weights in one, those that are wanted."""
    both, pooled = both_weights(weights, gate.pooled), gate.pooled
    if both.dim() == 2:
        flat = by_projected.flatten(1)
        return flat @ both if wanted[0] else None, flat.T @ pooled if wanted[1] else None
    arguments = ([1], [both.shape[-1] // 2], [1], False, [0], 1, [*wanted, False])
    found = torch.ops.aten.convolution_backward(by_projected, pooled.unsqueeze(1), both, None, *arguments)
    return found[0].squeeze(1) if wanted[0] else None, found[1]


def parameter_gradients(
    gate: Gate,
    gain: Tensor | None,
    weights: LightWeights,
    affine: Affine | None,
    sums: MapSums,
    by_gain: Tensor,
    by_projected: Tensor | None,
) -> tuple[LightWeights, Tensor | None, Tensor | None]:
    """Gradients of the weights, of scale and offset, None for what is absent, from those of gain, query and key."""
    query = key = value = history_scale = by_scale = by_offset = None
    scale, _, keep = affine or (None, None, None)
    scale, keep = wide(scale), per_sample(keep)
    if by_projected is not None:
        query, key = projection_backward(gate, weights, by_projected, (False, True))[1].chunk(2)
    if weights.value is not None:
        value = times(sums.taps, None if gain is None else gain.unsqueeze(-1)).sum(0).view(weights.value.shape)
    by_slope = None if sums.slope is None else times(sums.slope, keep)
    if weights.history_scale is not None and by_slope is not None:  # else there is nothing that lambda scales yet
        history_scale = times(by_slope.sum(0), scale)
    if scale is not None:
        by_scale = times(by_gain, channel_gate(gate.gate, by_gain.shape[1]), keep)
        if by_slope is not None:
            by_scale = by_scale + times(by_slope, wide(weights.history_scale))
        by_scale, by_offset = by_scale.sum(0), times(sums.shift, keep).sum(0)
    return LightWeights(query, key, value, history_scale), by_scale, by_offset
