"""Backbones with layer attention, registered in the root registry so that every OpenMMLab scope finds them."""

from mrla_mm.backbones.layer_decay import LayerDecayOptimWrapperConstructor
from mrla_mm.backbones.resnet import MRLAResNet
from mrla_mm.backbones.vit import MRLAViT, ViT

__all__ = ["LayerDecayOptimWrapperConstructor", "MRLAResNet", "MRLAViT", "ViT"]
