"""Small models with layer attention, in double precision with values at which every path counts."""

import torch
from torch import nn

from mrla_mm.backbones import MRLAResNet, MRLAViT


def randomise(model):
    """Give norms and lambda values at which every path counts; return the model in eval mode, double precision."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            module.weight.data.uniform_(0.3, 1.2, generator=generator)
            module.bias.data.normal_(0, 0.3, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("history_scale"):
            parameter.data.uniform_(-0.5, 1.5, generator=generator)
        elif ".attention." in name:
            parameter.data.normal_(0, 0.6, generator=generator)
    return model.double().eval()


def resnet(variant, norm="BN", depth=18, **arguments):
    """Return a narrow ResNet of two stages."""
    norm_cfg = dict(type="GN", num_groups=4) if norm == "GN" else dict(type="BN")
    attention = dict(type=variant, head_channels=4, **arguments)
    torch.manual_seed(0)
    return randomise(
        MRLAResNet(
            depth, attention, base_channels=8, stem_channels=8, num_stages=2, strides=(1, 2), dilations=(1, 1),
            out_indices=(0, 1), norm_cfg=norm_cfg, norm_eval=False,
        )
    )  # fmt: skip


def vit(variant, **arguments):
    """Return a narrow vision transformer of two stages of three blocks."""
    arch = dict(embed_dims=16, num_layers=6, num_heads=2, feedforward_channels=32)
    attention = dict(type=variant, head_channels=8, **arguments)
    torch.manual_seed(0)
    return randomise(MRLAViT(arch, attention, img_size=32, patch_size=8, stage_blocks=3, out_type="featmap"))
