"""Backbones with layer attention, registered in the root registry so that every OpenMMLab scope finds them."""

from mrla_mm.backbones.efficientnet import MRLAEfficientNet
from mrla_mm.backbones.pvtv2 import MRLAPVTv2, PVTv2
from mrla_mm.backbones.resnet import MRLAResNet

__all__ = ["MRLAEfficientNet", "MRLAPVTv2", "MRLAResNet", "PVTv2"]
