"""EfficientNet with layer attention, on mmdet's EfficientNet."""

from collections.abc import Mapping, Sequence

import torch
from mmdet.models.backbones import EfficientNet
from mmdet.models.backbones.efficientnet import EdgeResidual
from mmdet.models.layers import InvertedResidual
from mmengine.model import BaseModule, ModuleList, Sequential
from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention import AttentionConfig, LayerAttentionResidual, attention_config
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.backbones.resnet import MRLAResLayer
from mrla_mm.weights import KeyLayout, PretrainedBackbone

# Parts of a block of torchvision's EfficientNet by mmdet's names, in their order.
CONVOLUTION = {"0.": "conv.", "1.": "bn."}
SQUEEZE = {"fc1.": "conv1.conv.", "fc2.": "conv2.conv."}
BLOCK = {
    "expand_conv": CONVOLUTION,
    "depthwise_conv": CONVOLUTION,
    "se": SQUEEZE,
    "linear_conv": CONVOLUTION,
}
LIGHT = dict(type="MRLALight", head_channels=8)  # the paper's, App. B.1


class MRLAMBConv(BaseModule):
    """mmdet's MBConv (fused in the EdgeTPU models), with layer attention if it has a shortcut.

    A block without a shortcut starts a stage: it has no layer attention and returns no memory. The
    block's modules keep their names, so plain EfficientNet weights load.
    """

    def __init__(
        self, block: InvertedResidual | EdgeResidual, mrla: LayerAttentionResidual | None
    ) -> None:
        super().__init__()
        parts = {name: part for name, part in block.named_children() if name != "drop_path"}
        for name, part in parts.items():
            self.add_module(name, part)
        self.part_names = tuple(parts)  # mmdet registers them in the order in which it runs them
        self.drop_path_rate = getattr(block.drop_path, "drop_prob", 0.0)
        self.with_cp = block.with_cp
        self.mrla = mrla

    def forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run block and layer attention: x and the stage's memory -> both behind the block."""
        return run_checkpointed(self.with_cp, self._forward, x, *memory)

    def _forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        out = x
        for name in self.part_names:
            out = getattr(self, name)(out)
        if self.mrla is None:
            return (out,)
        keep = self.draw_keep(x)
        if keep is None:  # without a keyword, which mmengine's checkpointing refuses
            return self.mrla(x + out, x, *memory)
        return self.mrla(x + out * keep, x, *memory, keep=keep)

    def draw_keep(self, x: Tensor) -> Tensor | None:
        """Draw a factor (B, 1, 1, 1), 0 or 1 / (survival probability); None to drop nothing.

        The block and its layer attention share it: a dropped block leaves nothing to attend to
        (App. B.1).
        """
        if not (self.training and self.drop_path_rate):
            return None
        survival = 1 - self.drop_path_rate
        kept = torch.bernoulli(torch.full((len(x), 1, 1, 1), survival, device=x.device))
        return kept.div(survival).to(x.dtype)


class MRLAMBConvLayer(Sequential):
    """Blocks that pass on a memory, empty at first and after a block without a shortcut."""

    forward = MRLAResLayer.forward


class TorchvisionLayout(KeyLayout):
    """The layout of torchvision's EfficientNet, which pads and normalises in its own way."""

    def doubts(self, backbone: "MRLAEfficientNet", state: Mapping[str, Tensor]) -> list[str]:
        """Doubt another padding and other norms than torchvision's."""
        found = []
        if not any(key.startswith("features.") for key in state):
            return found
        if (backbone.conv_cfg or {}).get("type") == "Conv2dAdaptivePadding":
            found.append("torchvision's weights, but another padding: set conv_cfg.type=Conv2d")
        eps = 1e-3 if backbone.arch in ("b5", "b6", "b7") else 1e-5
        if backbone.norm_cfg.get("eps", 1e-5) != eps:
            found.append(f"torchvision's weights, but other norms: set norm_cfg.eps={eps}")
        return found


def torchvision_names(layer_setting: Sequence[Sequence[Sequence[int]]]) -> dict[str, str]:
    """Return torchvision's key prefixes with mmdet's.

    torchvision has a stage of `features` for each width, mmdet a layer for each resolution, which
    holds two stages where the width changes within it. A row of mmdet's `layer_setting` is a
    block's kernel size, channels, squeeze ratio, stride, expansion and kind.
    """
    names = prefixed("features.0.", "layers.0.", CONVOLUTION)
    stage = 0
    for layer, rows in enumerate(layer_setting[1:-1], start=1):
        for index, (_, channels, _, _, expansion, _) in enumerate(rows):
            if index == 0 or channels != rows[index - 1][1]:
                stage += 1
                block = 0
            else:
                block += 1
            parts = [part for part in BLOCK if expansion > 1 or part != "expand_conv"]
            for place, part in enumerate(parts):
                theirs = f"features.{stage}.{block}.block.{place}."
                names |= prefixed(theirs, f"layers.{layer}.{index}.{part}.", BLOCK[part])
    last = f"layers.{len(layer_setting) - 1}."
    return names | prefixed(f"features.{stage + 1}.", last, CONVOLUTION)


def prefixed(theirs: str, ours: str, names: dict[str, str]) -> dict[str, str]:
    """Return a table of names with their prefix and ours before them."""
    return {f"{theirs}{left}": f"{ours}{right}" for left, right in names.items()}


@MODELS.register_module(force=True)
class MRLAEfficientNet(PretrainedBackbone, EfficientNet):
    """EfficientNet whose blocks attend to the earlier blocks of their stage (MRLA, ICLR 2023).

    Layer attention follows the blocks that have a shortcut, and only those, and is dropped in
    training together with its block (`drop_path_rate`). `with_cp`, `frozen_stages`, `norm_eval` and
    `norm_cfg` reach it as in `MRLAResNet`.

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
        if self.layer_attention is not None:
            # mmengine's ModuleList hands init_weights on; the first and last layer have no blocks
            self.layers = ModuleList(
                self.add_layer_attention(layer) if isinstance(layer, Sequential) else layer
                for layer in self.layers
            )
        self._freeze_stages()

    def add_layer_attention(self, layer: Sequential) -> MRLAMBConvLayer:
        """Replace the blocks of a layer by blocks with layer attention."""
        blocks = []
        first_in_stage = True
        for block in layer:
            *_, last = block.children()
            branch = None
            # mmdet's two kinds of blocks name the same thing differently
            if getattr(block, "with_res_shortcut", getattr(block, "with_residual", False)):
                branch = LayerAttentionResidual(
                    self.layer_attention,
                    last.conv.out_channels,
                    norm_cfg=self.norm_cfg,
                    zero_init=self.zero_init_attention,
                    first_in_stage=first_in_stage,
                )
            blocks.append(MRLAMBConv(block, branch))
            first_in_stage = branch is None
        return MRLAMBConvLayer(*blocks)

    @property
    def unbuilt_parts(self) -> tuple[str, ...]:
        """Prefixes of keys in full weight files, of the layers after the last of `out_indices`."""
        missing = range(len(self.layers), len(self.layer_setting))
        return tuple(f"layers.{index}." for index in missing)

    def published_layout(self) -> KeyLayout:
        """Return torchvision's layout, whose names depend on the size."""
        prefixes = torchvision_names(self.layer_setting)
        return TorchvisionLayout(prefixes, classifier={"classifier.1.": "head.fc."})
