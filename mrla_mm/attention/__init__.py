"""Layer attention over feature maps: the variants of the paper and the residual branch that holds one of them."""

from mrla_mm.attention.base import LayerAttention, Memory, eca_kernel_size
from mrla_mm.attention.light import LightMemory, MRLALight
from mrla_mm.attention.linear import LinearMemory, LinearRLA
from mrla_mm.attention.residual import LayerAttentionResidual, build_layer_attention
from mrla_mm.attention.softmax import MLA, MLAMemory, MRLABase, SoftmaxMemory
from mrla_mm.attention.tokens import TokenAttentionResidual

__all__ = [
    "MLA",
    "LayerAttention",
    "LayerAttentionResidual",
    "LightMemory",
    "LinearMemory",
    "LinearRLA",
    "MLAMemory",
    "MRLABase",
    "MRLALight",
    "Memory",
    "SoftmaxMemory",
    "TokenAttentionResidual",
    "build_layer_attention",
    "eca_kernel_size",
]
