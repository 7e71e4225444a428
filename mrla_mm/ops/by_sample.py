"""The end of a residual block with MRLA-light by the folded path, a few samples at a time, as suits the cache of a CPU.

A pass over whole maps fetches them from memory again. The samples of a part fit the cache, and go through all passes
before those of the next: of the size of a map, forward reads c and the shortcut and writes y, backward reads these two
and the gradient and writes two gradients. x and everything between them exist for one part only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrla_mm.ops import folded
from mrla_mm.ops.frozen_norm import FrozenNorm
from mrla_mm.ops.fused import in_precision
from mrla_mm.ops.gating import (
    Affine,
    Gate,
    LightWeights,
    MapSums,
    fold_light,
    gain_gradient,
    gate_gradients,
    light_gain,
    parameter_gradients,
    pooled_gate,
)


def light_forward(
    heads: int, c: Tensor, shortcut: Tensor, norm: FrozenNorm, weights: LightWeights, affine: Affine, *, history: bool
) -> tuple[Tensor, Gate]:
    """Compute y (B, C, H, W) and the gate of `block_end.LightBlockEnd`."""
    y, gates = torch.empty_like(c), []
    for samples in folded.parts(c):
        own, factors = shortcut[samples], affine.of(samples)
        x, pooled = folded.activate(c[samples], own, norm, pooled=weights.query is not None)
        gate = Gate() if pooled is None else pooled_gate(pooled, weights, heads)
        gain = light_gain(gate.gate, factors, c.shape[1])
        coefficients = fold_light(x, gain, weights, factors, history=history)
        folded.light_forward(x, own if history else None, coefficients, residual=True, out=y[samples])
        gates.append(gate)
    return y, Gate(*(folded.joined(parts) for parts in zip(*gates, strict=True)))


def light_backward(
    grad: Tensor,
    c: Tensor,
    shortcut: Tensor,
    norm: FrozenNorm,
    gate: Gate,
    weights: LightWeights,
    affine: Affine,
    *,
    history: bool,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor, list[Tensor | None], list[Tensor | None]]:
    """Gradients of c, of the shortcut, of weight and bias of the norm, and of light's weights, scale and offset.

    needed says which of c, the norm's weight and its bias take a gradient.
    """
    by_c, by_shortcut = torch.empty_like(c) if needed[0] else None, torch.empty_like(c)
    scale, gain = norm.scale()[:, None, None], light_gain(gate.gate, affine, c.shape[1])
    coefficients = fold_light(c, gain, weights, affine, history=history)
    found = []
    for samples in folded.parts(c):
        part, before, own = grad[samples], c[samples], shortcut[samples]
        x, _ = folded.activate(before, own, norm, pooled=False)
        sums = folded.light_sums(part, x, own if history else None, coefficients.taps.shape[-1], shift=True)
        by_gain, constant, by_projected = gain_gradient(weights, sums.taps), None, None
        if gate.gate is not None:
            constant, by_projected = gate_gradients(x, gate.of(samples), weights, affine.of(samples), by_gain)
        by_normed, _ = folded.block_backward(part, x, coefficients.of(samples), constant, out=by_shortcut[samples])
        if by_c is not None:
            torch.mul(by_normed, scale, out=by_c[samples])
        _, by_weight, by_bias = norm.gradients(by_normed, before, [False, *needed[1:]])
        found.append((*sums, by_gain, by_projected, by_weight, by_bias))
    *sums, by_gain, by_projected = (folded.joined(parts) for parts in zip(*(f[:-2] for f in found), strict=True))
    by_norm = [summed(parts) for parts in zip(*(f[-2:] for f in found), strict=True)]
    found = parameter_gradients(gate, gain, weights, affine, MapSums(*sums), by_gain, by_projected)
    return by_c, by_shortcut, by_norm, in_precision(found, weights, affine)


def summed(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sum over parts of the batch."""
    return None if parts[0] is None else sum(parts[1:], start=parts[0])
