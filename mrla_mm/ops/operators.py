"""The operators of layer attention, each by the path that `dispatch` chooses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrla_mm.ops import block_end, fused, reference
from mrla_mm.ops.dispatch import choose_path
from mrla_mm.ops.gating import Affine, LightWeights


def global_average(x: Tensor) -> Tensor:
    """Average each channel over its map, GAP of Algorithm 1: (B, C, H, W) -> (B, C), at least single precision."""
    path = choose_path(x).path
    return reference.global_average(x) if path == "reference" else fused.global_average(path, x)


def depthwise_value(x: Tensor, weight: Tensor | None) -> Tensor:
    """Value of a layer, a depthwise 3x3 convolution; without a weight the value is x itself.

    Shapes:
        x (B, C, H, W), weight (C, 1, 3, 3) -> (B, C, H, W).
    """
    path = choose_path(x).path
    if path == "reference" or weight is None:
        return reference.depthwise_value(x, weight)
    return fused.light(path, x, None, LightWeights(value=weight), heads=1, affine=None)


def light(
    x: Tensor, previous: Tensor | None, weights: LightWeights, *, heads: int, affine: Affine | None = None
) -> Tensor:
    """MRLA-light, o = sigmoid(q . k / sqrt(D)) v + lambda previous (Eq. 8, Algorithm 3).

    Shapes:
        x and previous (B, C, H, W) -> o (B, C, H, W), or with an affine x + keep (scale o + offset).
    """
    path = choose_path(x).path
    if path != "reference":
        return fused.light(path, x, previous, weights, heads=heads, affine=affine)
    gate = None
    if weights.query is not None:
        pooled = reference.global_average(x)
        query, key = (reference.split_heads(reference.project(pooled, w), heads) for w in (weights.query, weights.key))
        gate = reference.light_gate(query, key)  # (B, G)
    value = reference.depthwise_value(x, weights.value)
    out = reference.light_attention(value, gate, previous, weights.history_scale)
    return out if affine is None else reference.affine_residual(x, out, *affine)


def light_block_end(
    c: Tensor,
    shortcut: Tensor,
    weights: LightWeights,
    *,
    heads: int,
    affine: Affine,
    history: bool = True,
) -> Tensor:
    """End of a residual block with MRLA-light: x = relu(c + shortcut), and `light` of x with an affine.

    The history, if any, is the shortcut.

    Shapes:
        c and shortcut (B, C, H, W) -> (B, C, H, W).
    """
    path = choose_path(c).path
    if path != "reference" and not torch.compiler.is_compiling():
        return block_end.light_block_end(path, c, shortcut, weights, heads=heads, affine=affine, history=history)
    x = (c + shortcut).relu()
    return light(x, shortcut if history else None, weights, heads=heads, affine=affine)


def weighted_sum(
    scores: Tensor, values: Sequence[Tensor], *, x: Tensor | None = None, affine: Affine | None = None
) -> Tensor:
    """Sum over layers of score times value, each value read once and none concatenated.

    Shapes:
        scores (B, G, T), T values (B, C, H, W) -> o (B, C, H, W), or with an affine x + keep (scale o + offset).
    """
    path = choose_path(values[-1]).path
    if path != "reference":
        return fused.weighted_sum(path, scores, values, x=x, affine=affine)
    out = reference.weighted_sum(scores, values)
    return out if affine is None else reference.affine_residual(x, out, *affine)


def base_block_end(
    c: Tensor,
    shortcut: Tensor,
    weights: Sequence[Tensor],
    earlier: tuple[Sequence[Tensor], Sequence[Tensor]],
    *,
    heads: int,
    affine: Affine,
) -> tuple[Tensor, Tensor, Tensor]:
    """End of a residual block with MRLA-base: x = relu(c + shortcut), then attention over the stage's layers.

    weights are those of query, key and value, earlier the keys and values of the stage's earlier layers.

    Shapes:
        c and shortcut (B, C, H, W), keys (B, G, D), values (B, C, H, W) -> y (B, C, H, W) and the layer's own key and
        value.
    """
    path = choose_path(c).path
    if path != "reference" and not torch.compiler.is_compiling():
        return block_end.base_block_end(path, c, shortcut, weights, earlier, affine, heads=heads)
    x, (keys, values), (query, key, value) = (c + shortcut).relu(), earlier, weights
    scores, key = reference.base_scores(global_average(x), query, key, keys, heads)
    value = depthwise_value(x, value)
    return weighted_sum(scores, (*values, value), x=x, affine=affine), key, value
