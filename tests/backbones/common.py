"""A small member of each family of backbones, and what tests do to every one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from mmcv.cnn import ConvModule
from mmdet.models import backbones as hosts
from mmdet.models.layers import nlc_to_nchw
from torch import nn

from mrla_mm import backbones
from mrla_mm.attention import LayerAttentionResidual

from ..attention.stages import assert_same


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
    backbone.zero_grad()  # to None: a tensor that was returned before stays as it is
    sum((level**2).sum() for level in backbone(image)).backward()
    return {name: parameter.grad for name, parameter in backbone.named_parameters()}


def assert_same_with_gradients(actual, expected, leaves, tolerance=1e-9):
    assert_same(actual, expected, dict(enumerate(leaves, len(expected))), tolerance)


def load_plain(plain: nn.Module, backbone: nn.Module) -> nn.Module:
    assert not plain.load_state_dict(backbone.state_dict(), strict=False).missing_keys
    plain.train(backbone.training)
    return plain


def assert_same_levels(backbone, plain, image, tolerance=1e-5):
    torch.testing.assert_close(backbone(image), plain(image), atol=tolerance, rtol=tolerance)


def resnet_by_hand(backbone, plain, image):
    """Plain blocks of mmdet, each followed by our branch; its memory is reset at every stage.

    RegNet has no pooling, its shortcut is a block's input if that has the output's shape, and a
    stage of one block has no layer attention.
    """
    regnet = isinstance(plain, hosts.RegNet)
    x, outs = plain.relu(plain.norm1(plain.conv1(image))), []
    x = x if regnet else plain.maxpool(x)
    for name in plain.res_layers:
        memory = ()
        stage = getattr(plain, name)
        for block, ours in zip(stage, getattr(backbone, name), strict=True):
            attended = len(stage) > 1 if regnet else ours.mrla is not None
            shortcut = x
            if block.downsample is not None:
                shortcut = None if regnet else block.downsample(x)
            x = block(x)
            if attended:
                x, *memory = ours.mrla(x, shortcut, *memory)
        outs.append(x)
    return outs


def swin_by_hand(backbone, plain, image):
    (x, grid), outs = plain.patch_embed(image), []
    for index, (stage, our_stage) in enumerate(zip(plain.stages, backbone.stages, strict=True)):
        memory = ()
        for block, ours in zip(stage.blocks, our_stage.blocks, strict=True):
            x, *memory = ours.mrla(block(x, grid), x, grid, *memory)
        outs.append(nlc_to_nchw(getattr(plain, f"norm{index}")(x), grid))
        if stage.downsample is not None:
            x, grid = stage.downsample(x, grid)
    return outs


def has_shortcut(block):
    """Whether one of mmdet's EfficientNet blocks has a shortcut; its two kinds name it apart."""
    return getattr(block, "with_res_shortcut", False) or getattr(block, "with_residual", False)


def efficientnet_by_hand(backbone, plain, image):
    """As for ResNet; a block without a shortcut has no branch and resets the memory."""
    x, outs = image, []
    for index, (layer, ours) in enumerate(zip(plain.layers, backbone.layers, strict=True)):
        if isinstance(layer, ConvModule):
            x = layer(x)
        else:
            memory = ()
            for block, our_block in zip(layer, ours, strict=True):
                out = block(x)
                x, *memory = our_block.mrla(out, x, *memory) if has_shortcut(block) else (out,)
        if index in plain.out_indices:
            outs.append(x)
    return outs


def pvt_by_hand(backbone, plain, image):
    x, outs = image, []
    for layer, our_layer in zip(plain.layers, backbone.layers, strict=True):
        embed, blocks, norm = layer
        (x, grid), memory = embed(x), ()
        for block, ours in zip(blocks, our_layer[1], strict=True):
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
    plain: Callable[..., nn.Module]
    build: Callable[..., nn.Module]
    by_hand: Callable[..., list[torch.Tensor]]
    head_channels: int
    frozen: tuple[str, ...]  # prefixes of the parameters that frozen_stages=2 freezes
    drop_path: str = "drop_path_rate"

    def mrla(self, variant: str = "light", **kwargs: object) -> nn.Module:
        name, arguments = VARIANTS[variant]
        attention = dict(type=name, head_channels=self.head_channels, **arguments)
        return self.build(layer_attention=attention, **kwargs)


class OwnAttention(nn.Module):
    """A variant of a user's own, with nothing of ours; its memory is the last output."""

    uses_shortcut = True  # without it the shortcut is None on tokens

    def __init__(self, channels: int, head_channels: int, first_in_stage: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x, shortcut, memory=()):
        out = self.scale * torch.tanh(x)
        out = out if shortcut is None else out - shortcut / 2
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
RESNET_FROZEN = ("conv1.", "bn1.", "layer1.", "layer2.")
PVT = dict(embed_dims=16, num_layers=(2, 1, 2, 1), num_heads=(1, 2, 2, 4), drop_path_rate=0.0)
ARCH = dict(embed_dims=32, num_layers=6, num_heads=2, feedforward_channels=48)
VIT = dict(arch=ARCH, img_size=64, out_type="featmap", out_indices=(1, 5))
CEIT = dict(VIT, stem_channels=8)
EFFICIENTNET = dict(arch="b1", out_indices=(1, 2, 4))
REGNET = dict(w0=8, wa=6.0, wm=1.9, group_w=8, depth=8, bot_mul=1.0)  # 1, 2, 3, 2 blocks
SWIN = dict(embed_dims=16, depths=(2, 2, 3, 2), num_heads=(1, 1, 2, 2), drop_path_rate=0.0)
STAGES = ("layers.0.", "layers.1.")
TOKENS = ("cls_token", "pos_embed", "patch_embed.", *STAGES)


def resnet(depth: int) -> Family:
    plain, build = (partial(kind, depth, **RESNET) for kind in (hosts.ResNet, backbones.MRLAResNet))
    return Family(plain, build, resnet_by_hand, 8, RESNET_FROZEN, "attention_drop_path")


def transformer(plain: type, build: type, options: dict, frozen: tuple[str, ...]) -> Family:
    build = partial(build, stage_blocks=2, **options)
    return Family(partial(plain, **options), build, vit_by_hand, 16, frozen)


def anywhere(host: str, **options: object) -> Callable[..., nn.Module]:
    return partial(backbones.WithLayerAttention, f"mmdet.{host}", **options)


FAMILIES = {
    "resnet18": resnet(18),
    "resnet50": resnet(50),
    "vit": transformer(backbones.ViT, backbones.MRLAViT, VIT, TOKENS),
    "ceit": transformer(backbones.CeiT, backbones.MRLACeiT, CEIT, (*TOKENS, "stem.")),
    "pvtv2": Family(
        partial(hosts.PyramidVisionTransformerV2, **PVT),
        partial(backbones.MRLAPVTv2, "b0", **PVT),
        pvt_by_hand,
        head_channels=16,
        frozen=STAGES,
    ),
    "efficientnet": Family(
        partial(hosts.EfficientNet, **EFFICIENTNET),
        partial(backbones.MRLAEfficientNet, **EFFICIENTNET),
        efficientnet_by_hand,
        head_channels=8,
        frozen=STAGES,
    ),
    "regnet": Family(
        partial(hosts.RegNet, REGNET, norm_eval=False, zero_init_residual=False),
        anywhere("RegNet", arch=REGNET, norm_eval=False, zero_init_residual=False),
        resnet_by_hand,
        head_channels=8,
        frozen=RESNET_FROZEN,
        drop_path="attention_drop_path",
    ),
    "swin": Family(
        partial(hosts.SwinTransformer, **SWIN),
        anywhere("SwinTransformer", **SWIN),
        swin_by_hand,
        head_channels=16,
        frozen=("patch_embed.", "stages.0.", "stages.1.", "norm0.", "norm1."),
        drop_path="attention_drop_path",
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
