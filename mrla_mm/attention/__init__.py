"""Layer attention over feature maps: the variants and the residual branch that holds one."""

from mrla_mm.attention.base import (
    AttentionConfig,
    LayerAttention,
    attention_config,
    stage_pattern,
)
from mrla_mm.attention.light import MRLALight
from mrla_mm.attention.linear import LinearRLA
from mrla_mm.attention.residual import AttentionResidual, LayerAttentionResidual
from mrla_mm.attention.softmax import MLA, MRLABase
from mrla_mm.attention.tokens import TokenAttentionResidual
