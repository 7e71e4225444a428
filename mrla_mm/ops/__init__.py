"""The mathematics of layer attention as functions of tensors.

One vocabulary throughout the package: B batch, C channels, H W grid, G heads, D head channels (C = G * D), T depth in
the stage.
"""

from mrla_mm.ops.reference import (
    depthwise_value,
    expand_heads,
    feature_map,
    global_average,
    light_attention,
    light_gate,
    linear_attention,
    linear_state,
    project,
    softmax_scores,
    split_heads,
    weighted_sum,
)

__all__ = [
    "depthwise_value",
    "expand_heads",
    "feature_map",
    "global_average",
    "light_attention",
    "light_gate",
    "linear_attention",
    "linear_state",
    "project",
    "softmax_scores",
    "split_heads",
    "weighted_sum",
]
