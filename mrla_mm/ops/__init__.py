"""The mathematics of layer attention as functions of tensors.

One vocabulary throughout the package: B batch, C channels, H W grid, G heads, D head channels (C =
G * D), T depth in the stage.
"""

from mrla_mm.ops import proof, self_check
from mrla_mm.ops.base import base_fused, mla_fused
from mrla_mm.ops.dispatch import choose_path, is_exporting, why_not_fused
from mrla_mm.ops.light import light_fused
from mrla_mm.ops.reference import (
    BatchNorm,
    Weights,
    at_least_float32,
    feature_map,
    frozen_bn_affine,
    global_average,
    light_attention,
    light_gate,
    linear_attention,
    linear_state,
    project,
    scores_and_keys,
    softmax_scores,
    split_heads,
    weighted_sum,
    without_autocast,
)

proof.SELF_CHECKS |= dict.fromkeys(("numba", "triton"), self_check.self_check)
