"""The end of a residual block with MRLA-light by the folded path, a few samples at a time, as suits the cache of a CPU.

A pass over whole maps fetches them from memory again. The samples of a part fit the cache, and go through all passes
before those of the next: of the size of a map, forward reads c and the shortcut and writes x and y, backward reads x,
the shortcut and the gradient and writes two gradients. What lies between exists for one part only.
"""

import torch
from torch import Tensor

from mrla_mm.ops import folded
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
    heads: int, c: Tensor, shortcut: Tensor, weights: LightWeights, affine: Affine, *, history: bool
) -> tuple[Tensor, Tensor, Gate]:
    """Compute x and y (B, C, H, W) and the gate of `block_end.LightBlockEnd`."""
    x, y, gates = torch.empty_like(c), torch.empty_like(c), []
    for samples in folded.parts(c):
        part, own, factors = x[samples], shortcut[samples], affine.of(samples)
        torch.add(c[samples], own, out=part).relu_()
        pooled = None if weights.query is None else folded.pool(part)
        gate = Gate() if pooled is None else pooled_gate(pooled, weights, heads)
        gain = light_gain(gate.gate, factors, c.shape[1])
        coefficients = fold_light(part, gain, weights, factors, history=history)
        folded.light_forward(part, own if history else None, coefficients, residual=True, out=y[samples])
        gates.append(gate)
    return x, y, Gate(*(folded.joined(parts) for parts in zip(*gates, strict=True)))


def light_backward(
    grad: Tensor, x: Tensor, previous: Tensor | None, gate: Gate, weights: LightWeights, affine: Affine
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Gradients of c, of the shortcut, and of light's weights, scale and offset."""
    history = previous is not None
    by_shortcut = torch.empty_like(x)
    by_c = torch.empty_like(x) if history else by_shortcut
    gain = light_gain(gate.gate, affine, x.shape[1])
    coefficients = fold_light(x, gain, weights, affine, history=history)
    found = []
    for samples in folded.parts(x):
        part, own = grad[samples], x[samples]
        before = previous[samples] if history else None
        sums = folded.light_sums(part, own, before, coefficients.taps.shape[-1], shift=True)
        by_gain, constant, by_projected = gain_gradient(weights, sums.taps), None, None
        if gate.gate is not None:
            constant, by_projected = gate_gradients(own, gate.of(samples), weights, affine.of(samples), by_gain)
        out = by_c[samples], by_shortcut[samples]
        folded.block_backward(part, own, coefficients.of(samples), constant, out=out)
        found.append((*sums, by_gain, by_projected))
    *sums, by_gain, by_projected = (folded.joined(parts) for parts in zip(*found, strict=True))
    found = parameter_gradients(gate, gain, weights, affine, MapSums(*sums), by_gain, by_projected)
    return by_c, by_shortcut, in_precision(found, weights, affine)
