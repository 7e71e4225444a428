"""A small member of each family of backbones, and what tests do to every one of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from mmcv.cnn import ConvModule
from mmdet.models.backbones import EfficientNet, PyramidVisionTransformerV2, ResNet
from mmdet.models.layers import nlc_to_nchw
from torch import nn

from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.backbones import CeiT, MRLACeiT, MRLAEfficientNet, MRLAPVTv2, MRLAResNet, MRLAViT, ViT


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def branches(backbone: nn.Module) -> list[LayerAttentionResidual]:
    return [module for module in backbone.modules() if isinstance(module, LayerAttentionResidual)]


def randomize_zero_init(backbone: nn.Module) -> nn.Module:
    """Leave the identity start, so that layer attention takes part in outputs and gradients."""
    for branch in branches(backbone):
        for name, child in branch.named_children():
            if name.endswith("norm"):
                nn.init.uniform_(child.weight, 0.5, 1.0)
                nn.init.normal_(child.bias, std=0.5)
    return backbone


def randomize(backbone: nn.Module) -> nn.Module:
    """Draw all parameters and running statistics anew, tokens, positions and biases too."""
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return backbone


def gradients(backbone: nn.Module, image: torch.Tensor) -> dict[str, torch.Tensor | None]:
    backbone.zero_grad()
    sum((level**2).sum() for level in backbone(image)).backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in backbone.named_parameters()
    }


def assert_same_with_gradients(actual, expected, leaves, tolerance=1e-9):
    """Compare lists of float64 tensors and their gradients of all `leaves`."""
    found = []
    for outs in (actual, expected):
        generator = torch.Generator().manual_seed(0)
        probes = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outs]
        found.append([*outs, *torch.autograd.grad(outs, leaves, probes)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def resnet_by_hand(backbone, plain, image):
    """Plain blocks of mmdet, each followed by our branch; its memory is reset at every stage."""
    x, outs = plain.maxpool(plain.relu(plain.norm1(plain.conv1(image)))), []
    for name in plain.res_layers:
        memory = ()
        for block, ours in zip(getattr(plain, name), getattr(backbone, name), strict=True):
            shortcut = x if block.downsample is None else block.downsample(x)
            x, *memory = ours.mrla(block(x), shortcut, *memory)
        outs.append(x)
    return outs


def efficientnet_by_hand(backbone, plain, image):
    """As for ResNet; a block without a shortcut has no branch and resets the memory."""
    x, outs = image, []
    for index, (layer, ours) in enumerate(zip(plain.layers, backbone.layers, strict=True)):
        memory = ()
        for block, our_block in (
            () if isinstance(layer, ConvModule) else zip(layer, ours, strict=True)
        ):
            shortcut = getattr(block, "with_res_shortcut", getattr(block, "with_residual", None))
            x, *memory = our_block.mrla(block(x), x, *memory) if shortcut else (block(x),)
        x = layer(x) if isinstance(layer, ConvModule) else x
        if index in plain.out_indices:
            outs.append(x)
    return outs


def pvt_by_hand(backbone, plain, image):
    x, outs = image, []
    for (embed, blocks, norm), (_, our_blocks, _) in zip(
        plain.layers, backbone.layers, strict=True
    ):
        (x, grid), memory = embed(x), ()
        for block, ours in zip(blocks, our_blocks, strict=True):
            x, *memory = ours.mrla(block(x, grid), x, grid, *memory)
        x = nlc_to_nchw(norm(x), grid)
        outs.append(x)
    return outs


def vit_by_hand(backbone, plain, image):
    """Stages of two blocks, the norm after the last; `plain` is ViT or CeiT."""
    (x, grid), memory, outs = plain.embed(image), (), []
    for index, ours in enumerate(backbone.layers):
        (out,) = plain.run_block(index, grid, x)
        x, *memory = ours.mrla(out, x, grid, *(memory if index % 2 else ()))
        x = plain.ln1(x) if index == plain.num_layers - 1 else x
        if index in plain.out_indices:
            outs.append(x[:, 1:].transpose(1, 2).unflatten(2, grid))
    return outs


@dataclass
class Family:
    """A small member of a family, plain and with a variant, and what is frozen first."""

    plain: Callable[..., nn.Module]
    build: Callable[..., nn.Module]
    by_hand: Callable[..., list[torch.Tensor]]
    head_channels: int
    frozen: tuple[str, ...]  # prefixes of the parameters that frozen_stages=2 freezes
    drop_path: str = "drop_path_rate"

    def mrla(self, variant: str = "light", **kwargs: object) -> nn.Module:
        name, arguments = VARIANTS[variant]
        return self.build(dict(type=name, head_channels=self.head_channels, **arguments), **kwargs)


class OwnAttention(nn.Module):
    """A variant of a user's own, with nothing of ours; its memory is the last output."""

    uses_shortcut = True  # without it the shortcut is None on tokens

    def __init__(self, channels: int, head_channels: int, first_in_stage: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x, shortcut, memory=()):
        out = self.scale * torch.tanh(x) - shortcut / 2
        out = out + memory[0] / 4 if memory else out
        return out, (out,)


VARIANTS = {
    "light": ("MRLALight", {}),
    "light-output": ("MRLALight", dict(previous="output")),
    "base": ("MRLABase", {}),
    "mla": ("MLA", {}),
    "linear": ("LinearRLA", {}),
    "own": (OwnAttention, {}),
}
RESNET = dict(base_channels=8, norm_eval=False, zero_init_residual=False)
PVT = dict(embed_dims=16, num_layers=(2, 1, 2, 1), num_heads=(1, 2, 2, 4), drop_path_rate=0.0)
ARCH = dict(embed_dims=32, num_layers=6, num_heads=2, feedforward_channels=48)
VIT = dict(arch=ARCH, img_size=64, out_type="featmap", out_indices=(1, 5))
CEIT = dict(VIT, stem_channels=8)
STAGES = ("layers.0.", "layers.1.")
TOKENS = ("cls_token", "pos_embed", "patch_embed.", *STAGES)


def resnet(depth: int) -> Family:
    return Family(
        plain=lambda **kw: ResNet(depth, **{**RESNET, **kw}),
        build=lambda attention, **kw: MRLAResNet(depth, attention, **{**RESNET, **kw}),
        by_hand=resnet_by_hand,
        head_channels=8,
        frozen=("conv1.", "bn1.", "layer1.", "layer2."),
        drop_path="attention_drop_path",
    )


FAMILIES = {
    "resnet18": resnet(18),
    "resnet50": resnet(50),
    "vit": Family(
        plain=lambda **kw: ViT(**{**VIT, **kw}),
        build=lambda attention, **kw: MRLAViT(
            layer_attention=attention, **{**VIT, "stage_blocks": 2, **kw}
        ),
        by_hand=vit_by_hand,
        head_channels=16,
        frozen=TOKENS,
    ),
    "ceit": Family(
        plain=lambda **kw: CeiT(**{**CEIT, **kw}),
        build=lambda attention, **kw: MRLACeiT(
            layer_attention=attention, **{**CEIT, "stage_blocks": 2, **kw}
        ),
        by_hand=vit_by_hand,
        head_channels=16,
        frozen=(*TOKENS, "stem."),
    ),
    "pvtv2": Family(
        plain=lambda **kw: PyramidVisionTransformerV2(**{**PVT, **kw}),
        build=lambda attention, **kw: MRLAPVTv2("b0", attention, **{**PVT, **kw}),
        by_hand=pvt_by_hand,
        head_channels=16,
        frozen=STAGES,
    ),
    "efficientnet": Family(
        plain=lambda **kw: EfficientNet("b1", out_indices=(1, 2, 4), **kw),
        build=lambda attention, **kw: MRLAEfficientNet(
            "b1", attention, out_indices=(1, 2, 4), **kw
        ),
        by_hand=efficientnet_by_hand,
        head_channels=8,
        frozen=STAGES,
    ),
}
# By family and size: width of the classifier of 1000 classes, and the parameters with it of the
# plain model, with MRLA-light and with MRLA-base (0: not in the paper). Tables 1 and 2 of the paper
# and the plain models' papers have them in millions, the paper's PVTv2-B0 without the classifier.
PARAMETERS = {
    ("ResNet", 50): (2048, 25_557_032, 25_738_452, 25_723_348),
    ("ResNet", 101): (2048, 44_549_160, 44_939_646, 44_907_134),
    ("ResNet", 152): (2048, 60_192_808, 60_767_784, 60_719_912),
    ("ViT", "deit-tiny"): (192, 5_717_416, 5_749_792, 5_742_880),
    ("ViT", "deit-small"): (384, 22_050_664, 22_115_296, 0),
    ("ViT", "deit-base"): (768, 86_567_656, 86_696_800, 0),
    ("CeiT", "ceit-tiny"): (192, 6_354_600, 6_386_976, 6_380_064),
    ("CeiT", "ceit-small"): (384, 24_200_232, 24_264_864, 24_251_040),
    ("EfficientNet", "b0"): (1280, 5_288_548, 5_300_902, 5_299_878),
    ("EfficientNet", "b1"): (1280, 7_794_184, 7_815_996, 7_814_188),
    ("EfficientNet", "b7"): (2560, 66_347_960, 66_478_556, 66_467_708),
    ("PVTv2", "b0"): (256, 3_666_760, 3_681_160, 3_678_088),
    ("PVTv2", "b1"): (512, 14_009_000, 14_037_744, 14_031_600),
    ("PVTv2", "b5"): (512, 81_956_008, 82_170_660, 82_124_772),
}
