"""EfficientNet with layer attention, on mmdet's EfficientNet."""

from functools import cache

import torch
from mmcv.cnn.bricks import DropPath
from mmdet.models.backbones import EfficientNet
from mmengine.model import ModuleList, Sequential
from mmengine.registry import MODELS
from torch import Tensor
from torchvision import models

from mrla_mm.attention import AttentionConfig, LayerAttentionResidual, attention_config
from mrla_mm.backbones.branches import add_mixin
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.backbones.resnet import run_blocks
from mrla_mm.registry import register
from mrla_mm.weights import KeyLayout, PretrainedBackbone
from mrla_mm.weights.layouts import ATTENTION

# Of mmdet's blocks, which have some of them each, in the order in which they run.
STEPS = ("expand_conv", "conv1", "depthwise_conv", "se", "linear_conv", "conv2")
LIGHT = dict(type="MRLALight", head_channels=8)  # the paper's, App. B.1


class MRLAMBConv:
    """Mixin of mmdet's two kinds of MBConv, whose layer attention is `mrla`.

    That is None in a block without a shortcut, which starts a stage: it returns no memory.
    """

    def forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run block and layer attention: x and the stage's memory -> both after the block."""
        return run_checkpointed(self.with_cp, self._forward, x, *memory)

    def _forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        out = x
        for name in STEPS:
            if (step := getattr(self, name, None)) is not None:
                out = step(out)
        if self.mrla is None:
            return (out,)
        if not (self.training and isinstance(self.drop_path, DropPath)):
            # without a keyword, which mmengine's checkpointing refuses
            return self.mrla(x + out, x, *memory)
        # A dropped block leaves nothing to attend to (App. B.1), so they share what is drawn.
        keep = self.drop_path(x.new_ones(len(x), 1, 1, 1))
        return self.mrla(x + out * keep, x, *memory, keep=keep)


class MRLAMBConvLayer:
    """Mixin of a layer whose blocks pass on a memory, empty after one without a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks: (B, C', H', W') -> (B, C, H, W)."""
        return run_blocks(self, x)


@cache
def torchvision_keys(arch: str) -> list[str]:
    """Return the keys of torchvision's EfficientNet, whose layers have the order of mmdet's."""
    build = getattr(models, f"efficientnet_{arch}", None)  # it lacks b8 and the EdgeTPU models
    if build is None:
        return []
    with torch.device("meta"):
        return [*build().features.state_dict(prefix="features.")]


@register(MODELS)
class MRLAEfficientNet(PretrainedBackbone, EfficientNet):
    """EfficientNet whose blocks attend to the earlier blocks of their stage (MRLA, ICLR 2023).

    Layer attention follows the blocks that have a shortcut, and only those, which is our reading of
    the paper. It is dropped in training together with its block (`drop_path_rate`, App. B.1).
    `with_cp`, `frozen_stages`, `norm_eval` and `norm_cfg` reach it as in `MRLAResNet`.

    torchvision's weights need ``conv_cfg=dict(type="Conv2d")``, since they pad all sides alike, and
    up to B4 ``norm_cfg=dict(type="BN", eps=1e-5)``.

    Args:
        arch: "b0" to "b8", or the EdgeTPU models "es", "em" and "el", which torchvision does not
            have.
        layer_attention, zero_init_attention: as in `MRLAResNet`, by default with head_channels=8.
        frozen_stages: number of layers, from the first, to freeze; 0 or -1 freezes nothing.
    """

    def __init__(
        self,
        arch: str = "b0",
        layer_attention: AttentionConfig = LIGHT,
        *,
        zero_init_attention: bool = True,
        frozen_stages: int = 0,
        **kwargs: object,
    ) -> None:
        super().__init__(arch, frozen_stages=max(frozen_stages, 0), **kwargs)
        self.arch = arch
        self.layer_attention = attention_config(layer_attention)
        self.zero_init_attention = zero_init_attention
        unbuilt = range(len(self.layers), len(self.layer_setting))  # after the last output
        self.unbuilt_parts = tuple(f"layers.{index}." for index in unbuilt)
        if self.layer_attention is not None:
            self.layers = ModuleList(self.layers)  # mmengine's, which hands init_weights on
            for layer in self.layers:
                if isinstance(layer, Sequential):  # the first and last have no blocks
                    self.add_layer_attention(layer)
        self._freeze_stages()

    def add_layer_attention(self, layer: Sequential) -> None:
        """Give the blocks of a layer that have a shortcut their layer attention."""
        first_in_stage = True
        for block in layer:
            *_, last = block.children()
            block.mrla = None
            # mmdet's two kinds of blocks name the same thing differently
            if getattr(block, "with_res_shortcut", getattr(block, "with_residual", False)):
                block.mrla = LayerAttentionResidual(
                    self.layer_attention,
                    last.conv.out_channels,
                    norm_cfg=self.norm_cfg,
                    zero_init=self.zero_init_attention,
                    first_in_stage=first_in_stage,
                )
            first_in_stage = block.mrla is None
            add_mixin(block, MRLAMBConv)
        add_mixin(layer, MRLAMBConvLayer)

    def published_layout(self) -> KeyLayout:
        """Return torchvision's layout, whose names depend on the size."""
        theirs = torchvision_keys(self.arch)
        ours = [key for key in self.state_dict() if ATTENTION not in key]
        unbuilt = theirs[len(ours) :]
        ours += [f"layers.{len(self.layers)}.{key}" for key in unbuilt]
        prefixes = dict(zip(theirs, ours, strict=False))
        return KeyLayout(prefixes, classifier={"classifier.1.": "head.fc."})
