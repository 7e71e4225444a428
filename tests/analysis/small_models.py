"""Small models with layer attention, in double precision with values at which every path counts."""

import torch

from mrla_mm.backbones import MRLAResNet, MRLAViT
from tests.backbones.common import randomize_zero_init


def resnet(variant, **arguments):
    attention = dict(type=variant, head_channels=4, **arguments)
    torch.manual_seed(0)
    stages = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    widths = dict(base_channels=8, stem_channels=8)
    model = MRLAResNet(18, attention, norm_eval=False, **widths, **stages)
    for key, statistics in model.named_buffers():
        if key.endswith("running_var"):
            statistics.uniform_(0.5, 2)
    return randomize_zero_init(model).double().eval()


def vit(variant, **arguments):
    arch = dict(embed_dims=16, num_layers=6, num_heads=2, feedforward_channels=32)
    attention = dict(type=variant, head_channels=8, **arguments)
    torch.manual_seed(0)
    model = MRLAViT(arch, attention, img_size=32, patch_size=8, stage_blocks=3, out_type="featmap")
    return randomize_zero_init(model).double().eval()
