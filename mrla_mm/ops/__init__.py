"""The mathematics of layer attention as functions of tensors.

One vocabulary throughout the package: B batch, C channels, H W grid, G heads, D head channels (C = G * D), T depth in
the stage.
"""

from mrla_mm.ops.dispatch import Choice, choose_path, is_exporting
from mrla_mm.ops.frozen_norm import FrozenNorm
from mrla_mm.ops.gating import Affine, LightWeights
from mrla_mm.ops.operators import (
    base_block_end,
    depthwise_value,
    global_average,
    light,
    light_block_end,
    weighted_sum,
)
from mrla_mm.ops.reference import (
    expand_heads,
    feature_map,
    light_attention,
    light_gate,
    linear_attention,
    linear_state,
    project,
    softmax_scores,
    split_heads,
)

__all__ = [
    "Affine",
    "Choice",
    "FrozenNorm",
    "LightWeights",
    "base_block_end",
    "choose_path",
    "depthwise_value",
    "expand_heads",
    "feature_map",
    "global_average",
    "is_exporting",
    "light",
    "light_attention",
    "light_block_end",
    "light_gate",
    "linear_attention",
    "linear_state",
    "project",
    "softmax_scores",
    "split_heads",
    "weighted_sum",
]
