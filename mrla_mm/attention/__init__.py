"""Layer attention over feature maps: the variants of the paper and the residual branch that holds one of them."""

from mrla_mm.attention.base import LayerAttention, Memory, eca_kernel_size
from mrla_mm.attention.fusion import Fusion, choose_fusion
from mrla_mm.attention.light import LightMemory, MRLALight
from mrla_mm.attention.linear import LinearMemory, LinearRLA
from mrla_mm.attention.residual import LayerAttentionResidual
from mrla_mm.attention.softmax import MLA, MLAMemory, MRLABase, SoftmaxMemory
from mrla_mm.attention.tokens import TokenAttentionResidual

__all__ = [
    "MLA",
    "Fusion",
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
    "choose_fusion",
    "eca_kernel_size",
]
