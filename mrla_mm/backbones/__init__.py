"""Backbones with layer attention, in the root registry so that every OpenMMLab scope finds them."""

import importlib.util

from mrla_mm.backbones.efficientnet import MRLAEfficientNet
from mrla_mm.backbones.pvtv2 import MRLAPVTv2
from mrla_mm.backbones.resnet import MRLAResNet
from mrla_mm.backbones.with_layer_attention import WithLayerAttention

if importlib.util.find_spec("mmpretrain"):
    from mrla_mm.backbones.ceit import MRLACeiT
    from mrla_mm.backbones.vit import MRLAViT
