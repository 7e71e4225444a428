"""MRLA-light as one linear function of the maps: its coefficients, and how their gradients follow from grid sums.

With the gate A, the drop-path factor k, and a frozen batch norm of scale s and offset t, the residual branch is

    y = x + k (s (A dw(x; W) + lambda p) + t) = x + dw(x; taps) + slope p + shift
    taps = k s A W,  slope = k s lambda,  shift = k t           per sample and channel

where dw is the depthwise convolution and p the history. Backward therefore needs only three sums over the grid: of grad
times each shifted x, of grad times p, and of grad. Everything here is small and at least in single precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.reference import at_least_float32, light_gate


class Affine(NamedTuple):
    """What the residual branch does with an attention's output o: y = x + keep (scale o + offset).

    scale and offset (C,) are a batch norm with frozen statistics; keep (B,) is the drop-path factor of each sample, or
    None for 1. keep takes no gradient.
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
    slope: Tensor | None = None
    shift: Tensor | None = None


class GridSums(NamedTuple):
    """Sums over the grid: of grad times shifted x (B, C, n), of grad times p and of grad (B, C), None if not needed."""

    taps: Tensor
    slope: Tensor | None = None
    shift: Tensor | None = None


class Gate(NamedTuple):
    """Gate of MRLA-light (B, G) and what its backward needs: pooled (B, C), query and key (B, 2, E)."""

    pooled: Tensor | None = None
    query_key: Tensor | None = None
    gate: Tensor | None = None


def take(parts: tuple | None, samples: slice) -> tuple | None:
    """Tensors of some samples; what all samples share, (C,) or (1, C), stays."""
    if parts is None:
        return None
    if isinstance(parts, Affine):
        return parts._replace(keep=None if parts.keep is None else parts.keep[samples])
    return type(parts)(*(None if t is None else t[samples] for t in parts))


def cat_chunks(chunks: Sequence[Gate]) -> Gate:
    """Tensors of all samples from those of parts of the batch."""
    if len(chunks) == 1:
        return chunks[0]
    return Gate(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)))


def product(*factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are not None, or None."""
    found = None
    for factor in factors:
        if factor is not None:
            found = factor if found is None else found * factor
    return found


def at_least_2d(per_channel: Tensor | None) -> Tensor | None:
    """(C,) -> (1, C); (B, C) as it is."""
    return per_channel.unsqueeze(0) if per_channel is not None and per_channel.dim() == 1 else per_channel


def unpack_affine(affine: Affine | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale and offset (C,) in at least single precision, keep (B, 1); None each without an affine."""
    scale, offset, keep = affine or (None, None, None)
    return at_least_float32(scale), at_least_float32(offset), None if keep is None else keep.unsqueeze(1)


def expand_gate(gate: Tensor | None, channels: int) -> Tensor | None:
    """Repeat a gate over the channels of its head: (B, G) -> (B, C)."""
    return None if gate is None else gate.unsqueeze(2).expand(-1, -1, channels // gate.shape[1]).flatten(1)


def project_both(pooled: Tensor, weights: LightWeights, heads: int) -> Gate:
    """Query, key and gate of pooled channels (B, C); query and key are one operation."""
    both = torch.cat((weights.query, weights.key)).to(pooled.dtype)  # (2, 1, k) or (2 E, C)
    if both.dim() == 2:
        query_key = F.linear(pooled, both).unflatten(1, (2, -1))  # (B, 2, E)
    else:
        query_key = F.conv1d(pooled.unsqueeze(1), both, padding=both.shape[-1] // 2)  # (B, 2, C)
    query, key = query_key.unflatten(2, (heads, -1)).unbind(1)
    return Gate(pooled, query_key, light_gate(query, key))


def light_coefficients(
    x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, *, heads: int, has_history: bool
) -> tuple[Gate, Coefficients]:
    """Return the gate, from its pooled channels unless it is known, and the coefficients for x (B, C, H, W)."""
    if gate.pooled is not None and gate.gate is None:
        gate = project_both(gate.pooled, weights, heads)
    (scale, offset, keep), (batch, channels) = unpack_affine(affine), x.shape[:2]
    taps = at_least_2d(product(expand_gate(gate.gate, channels), scale, keep))  # (B or 1, C): the gain, keep scale gate
    if weights.value is not None:
        taps = product(at_least_float32(weights.value).flatten(1), None if taps is None else taps.unsqueeze(-1))
    else:
        taps = torch.ones(1, 1, 1, dtype=gain_dtype(x), device=x.device) if taps is None else taps.unsqueeze(-1)
    slope = None
    if has_history:
        slope = product(at_least_float32(weights.history_scale), scale, keep)
        slope = torch.ones(channels, dtype=gain_dtype(x), device=x.device) if slope is None else slope
    return gate, Coefficients(
        taps.expand(batch, channels, -1).contiguous(), at_least_2d(slope), at_least_2d(product(offset, keep))
    )


def gain_dtype(x: Tensor) -> torch.dtype:
    """Precision of the coefficients for a map."""
    return torch.promote_types(x.dtype, torch.float32)


def light_coefficients_backward(
    x: Tensor, gate: Gate, weights: LightWeights, affine: Affine | None, sums: GridSums
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients that follow from the sums over the grid.

    Returns:
        What the gate adds to the gradient of every position of x (B, C); the gradients of the four weights, of scale
        and of offset, summed over the samples; None for what is absent.
    """
    (scale, _, keep), channels = unpack_affine(affine), x.shape[1]
    query, key, value, history_scale = weights
    grad_gain = sums.taps[..., 0]  # (B, C)
    if value is not None:
        grad_gain = (sums.taps * at_least_float32(value).flatten(1)).sum(-1)
    constant = grad_query = grad_key = grad_value = grad_history = grad_scale = grad_offset = None
    if gate.gate is not None:
        constant, (grad_query, grad_key) = gate_backward(gate, weights, product(grad_gain, scale, keep))
        constant = constant / (x.shape[2] * x.shape[3])
    gates = expand_gate(gate.gate, channels)
    if value is not None:
        gain = at_least_2d(product(gates, scale, keep))
        grad_value = product(sums.taps, None if gain is None else gain.unsqueeze(-1)).sum(0).view(value.shape)
    grad_slope = None if sums.slope is None else product(sums.slope, keep)
    if history_scale is not None and grad_slope is not None:
        grad_history = product(grad_slope.sum(0), scale)
    if scale is not None:
        grad_scale = product(grad_gain, gates, keep)
        if grad_slope is not None:
            grad_scale = grad_scale + product(grad_slope, at_least_float32(history_scale))
        grad_scale, grad_offset = grad_scale.sum(0), product(sums.shift, keep).sum(0)
    return constant, [grad_query, grad_key, grad_value, grad_history, grad_scale, grad_offset]


def gate_backward(gate: Gate, weights: LightWeights, grad_gates: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Gradients of pooled (B, C), and of the weights of query and key, from those of the gate by channel (B, C)."""
    pooled, query_key, gates = gate
    grad_gate = grad_gates.unflatten(1, (gates.shape[1], -1)).sum(-1)  # (B, G)
    key_query = query_key.flip(1).unflatten(2, (gates.shape[1], -1))  # (B, 2, G, D)
    grad_score = torch.ops.aten.sigmoid_backward(grad_gate, gates) * key_query.shape[-1] ** -0.5  # (B, G)
    grad_query_key = (grad_score[:, None, :, None] * key_query).flatten(2)  # (B, 2, E)
    both = torch.cat((weights.query, weights.key)).to(pooled.dtype)
    if both.dim() == 2:
        flat = grad_query_key.flatten(1)
        return flat @ both, (flat.T @ pooled).chunk(2)
    grad_pooled, grad_both, _ = torch.ops.aten.convolution_backward(
        grad_query_key, pooled.unsqueeze(1), both, None,
        [1], [both.shape[-1] // 2], [1], False, [0], 1, [True, True, False],
    )  # fmt: skip
    return grad_pooled.squeeze(1), grad_both.chunk(2)
