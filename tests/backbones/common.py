"""A small member of each family of backbones, and what tests do to every one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from mmdet.models import backbones as hosts
from mmpretrain.models.backbones import VisionTransformer
from torch import nn

from mrla_mm import backbones
from mrla_mm.attention import AttentionResidual

from ..attention.stages import assert_same


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def branches(backbone: nn.Module) -> list[AttentionResidual]:
    return [module for module in backbone.modules() if isinstance(module, AttentionResidual)]


def randomize_zero_init(backbone: nn.Module) -> nn.Module:
    """Leave the identity start, so that layer attention takes part in outputs and gradients."""
    for branch in branches(backbone):
        for name, child in branch.named_children():
            if name.endswith("norm"):
                nn.init.uniform_(child.weight, 0.5, 1.0)
                nn.init.normal_(child.bias, std=0.5)
    return backbone


def randomize(backbone: nn.Module) -> nn.Module:
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


def levels(backbone, image):
    """All tensors of what a backbone returns."""
    pending, found = [backbone(image)], []
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif value is not None:
            pending += value.values() if isinstance(value, dict) else value
    return found


def assert_equal(found, expected):
    for level, other in zip(found, expected, strict=True):
        assert torch.equal(level.nan_to_num(), other.nan_to_num())


def assert_same_with_gradients(actual, expected, leaves, tolerance=1e-9):
    assert_same(actual, expected, dict(enumerate(leaves, len(expected))), tolerance)


def load_plain(plain: nn.Module, backbone: nn.Module) -> nn.Module:
    assert not plain.load_state_dict(backbone.state_dict(), strict=False).missing_keys
    plain.train(backbone.training)
    return plain


def assert_same_levels(backbone, plain, image, tolerance=1e-5):
    torch.testing.assert_close(backbone(image), plain(image), atol=tolerance, rtol=tolerance)


def has_shortcut(block):
    return getattr(block, "with_res_shortcut", False) or getattr(block, "with_residual", False)


def stage_of(name):
    """The stage of a block by its name; with ViT and CeiT stages have two blocks."""
    stage, _, index = name.rpartition(".")
    return f"layers.{int(index) // 2}" if stage == "layers" else stage


def run_by_hand(backbone, plain, image):
    """Run plain blocks, each followed by our branch, whose memory is that of the stage."""
    memories, hooks = {}, []

    def attend(branch, stage, block, args, out):
        shortcut, *grid = args
        if shortcut.dim() == 3:
            grid = grid or [tuple(side // 16 for side in image.shape[2:])]
        elif getattr(block, "downsample", None) is not None:
            # RegNet's is the block's input if that has the output's shape
            shortcut = None if isinstance(plain, hosts.RegNet) else block.downsample(shortcut)
        out, *memories[stage] = branch(out, shortcut, *grid, *memories.get(stage, ()))
        return out

    modules, gaps = dict(backbone.named_modules()), 0
    for name, block in plain.named_modules():
        ours = modules.get(name)
        if isinstance(plain, hosts.EfficientNet) and hasattr(ours, "mrla"):
            gaps += not has_shortcut(block)  # behind which a stage starts
        if isinstance(getattr(ours, "mrla", None), AttentionResidual):
            hook = partial(attend, ours.mrla, (stage_of(name), gaps))
            hooks.append(block.register_forward_hook(hook))
    outs = plain(image)
    for hook in hooks:
        hook.remove()
    return list(outs)


@dataclass
class Family:
    plain: Callable[..., nn.Module]
    build: Callable[..., nn.Module]
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
VIT = dict(arch=ARCH, img_size=64, out_type="featmap", out_indices=[1, 5])
CEIT = dict(VIT, stem_channels=8)
EFFICIENTNET = dict(arch="b1", out_indices=(1, 2, 4))
REGNET = dict(w0=8, wa=6.0, wm=1.9, group_w=8, depth=8, bot_mul=1.0)  # 1, 2, 3, 2 blocks
SWIN = dict(embed_dims=16, depths=(2, 2, 3, 2), num_heads=(1, 1, 2, 2), drop_path_rate=0.0)
STAGES = ("layers.0.", "layers.1.")
TOKENS = ("cls_token", "pos_embed", "patch_embed.", *STAGES)


def resnet(depth: int) -> Family:
    plain, build = (partial(kind, depth, **RESNET) for kind in (hosts.ResNet, backbones.MRLAResNet))
    return Family(plain, build, 8, RESNET_FROZEN, "attention_drop_path")


def anywhere(host: str, **options: object) -> Callable[..., nn.Module]:
    return partial(backbones.WithLayerAttention, f"mmdet.{host}", **options)


FAMILIES = {
    "resnet18": resnet(18),
    "resnet50": resnet(50),
    "vit": Family(
        partial(VisionTransformer, **VIT),
        partial(backbones.MRLAViT, stage_blocks=2, **VIT),
        head_channels=16,
        frozen=TOKENS,
    ),
    "ceit": Family(
        partial(backbones.MRLACeiT, layer_attention=None, **CEIT),  # transcribed in test_vit.py
        partial(backbones.MRLACeiT, stage_blocks=2, **CEIT),
        head_channels=16,
        frozen=(*TOKENS, "stem."),
    ),
    "pvtv2": Family(
        partial(hosts.PyramidVisionTransformerV2, **PVT),
        partial(backbones.MRLAPVTv2, "b0", **PVT),
        head_channels=16,
        frozen=STAGES,
    ),
    "efficientnet": Family(
        partial(hosts.EfficientNet, **EFFICIENTNET),
        partial(backbones.MRLAEfficientNet, **EFFICIENTNET),
        head_channels=8,
        frozen=STAGES,
    ),
    "regnet": Family(
        partial(hosts.RegNet, REGNET, norm_eval=False, zero_init_residual=False),
        anywhere("RegNet", arch=REGNET, norm_eval=False, zero_init_residual=False),
        head_channels=8,
        frozen=RESNET_FROZEN,
        drop_path="attention_drop_path",
    ),
    "swin": Family(
        partial(hosts.SwinTransformer, **SWIN),
        anywhere("SwinTransformer", **SWIN),
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
