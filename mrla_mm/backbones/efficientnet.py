"""EfficientNet with layer attention after every block that has a shortcut, on mmdet's EfficientNet."""

import torch
from mmdet.models.backbones import EfficientNet
from mmdet.models.backbones.efficientnet import EdgeResidual
from mmdet.models.layers import InvertedResidual
from mmengine.model import BaseModule, ModuleList, Sequential
from mmengine.registry import MODELS
from torch import Tensor, is_grad_enabled
from torch.utils.checkpoint import checkpoint

from mrla_mm.arguments import (
    CONFIG,
    FLAG,
    INIT,
    MAP_NORM,
    RATE,
    check_arguments,
    check_keywords,
    check_maps,
    indices,
    naming,
    one_of,
    optional,
    whole,
)
from mrla_mm.attention import LayerAttentionResidual, Memory
from mrla_mm.backbones.norm_eval import evaluate_batch_norms
from mrla_mm.errors import InputError

RULES = dict(
    drop_path_rate=RATE,
    conv_cfg=optional(CONFIG),
    norm_cfg=MAP_NORM,
    act_cfg=CONFIG,
    init_cfg=INIT,
    norm_eval=FLAG,
    with_cp=FLAG,
)


def has_shortcut(block: InvertedResidual | EdgeResidual) -> bool:
    """Whether a block of mmdet adds its input to its output; the two kinds call it by different names."""
    return block.with_res_shortcut if isinstance(block, InvertedResidual) else block.with_residual


class MRLAMBConv(BaseModule):
    """MBConv (or fused MBConv of the EdgeTPU models) of mmdet with layer attention behind its shortcut.

    It takes over the parts of a built block under their names, so plain EfficientNet weights load. A block without a
    shortcut begins a stage: it has no layer attention and leaves no memory.

    Args:
        block: the block of mmdet.
        mrla: the layer attention's residual branch, None for a block without a shortcut.
    """

    def __init__(self, block: InvertedResidual | EdgeResidual, mrla: LayerAttentionResidual | None) -> None:
        super().__init__()
        parts = {name: part for name, part in block.named_children() if name != "drop_path"}
        for name, part in parts.items():
            self.add_module(name, part)
        self.part_names = tuple(parts)  # mmdet registers them in the order it runs them
        self.drop_path_rate = getattr(block.drop_path, "drop_prob", 0.0)
        self.with_cp = block.with_cp
        self.mrla = mrla

    def forward(self, x: Tensor, memory: Memory = None) -> tuple[Tensor, Memory]:
        """Run block and layer attention: x and the stage's memory -> the output (B, C, H, W) and the new memory."""
        if self.with_cp and is_grad_enabled():
            return checkpoint(self._forward, x, memory, use_reentrant=False)
        return self._forward(x, memory)

    def _forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        out = x
        for name in self.part_names:
            out = getattr(self, name)(out)
        if self.mrla is None:
            return out, None
        keep = self.draw(x)
        return self.mrla(x + (out if keep is None else out * keep), x, memory, keep)

    def draw(self, x: Tensor) -> Tensor | None:
        """Draw which samples keep this block, 0 or 1 / (survival probability) each: (B, 1, 1, 1), None for all.

        One draw serves the convolutions and their layer attention, which has nothing to attend to where the block is
        dropped (App. B.1).
        """
        if not (self.training and self.drop_path_rate):
            return None
        survival = 1 - self.drop_path_rate
        return torch.bernoulli(torch.full((len(x), 1, 1, 1), survival, device=x.device)).div(survival).to(x.dtype)


class MRLAMBConvLayer(Sequential):
    """Blocks of one resolution; the memory lives until a block without a shortcut, where the width changes too."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks: (B, C', H', W') -> (B, C, H, W)."""
        memory = None
        for block in self:
            x, memory = block(x, memory)
        return x


@MODELS.register_module()
class PlainEfficientNet(EfficientNet):
    """EfficientNet without layer attention that loads torchvision's weights, strictly and with a report.

    mmdet's takes those of mmpretrain alone. torchvision's pad every side alike and, up to B4, have norms of eps 1e-5:
    they need ``conv_cfg=dict(type="Conv2d"), norm_cfg=dict(type="BN", eps=1e-5)``.

    Args:
        arch: "b0" to "b8", or the EdgeTPU models "es", "em", "el", which torchvision does not have.
        **kwargs: those of mmdet's ``EfficientNet``.

    Raises:
        InputError: for an unknown arch, or more frozen stages than are built for `out_indices`.
    """

    key_layout = "efficientnet"  # of the files its weights are published in, see mrla_mm.weights

    def __init__(self, arch: str = "b0", **kwargs: object) -> None:
        check_keywords(type(self), kwargs)
        check_arguments(dict(arch=arch), dict(arch=one_of(*self.arch_settings)))
        depth = len(self.layer_settings[arch[:1]])
        check_arguments(kwargs, RULES | dict(out_indices=indices(depth), frozen_stages=whole(0, depth)))
        with naming(self, dict(arch=arch, **kwargs)):
            super().__init__(arch, **kwargs)
        if self.frozen_stages > len(self.layers):
            raise InputError(
                f"frozen_stages={self.frozen_stages} but out_indices={tuple(self.out_indices)} needs only "
                f"{len(self.layers)} stages; freeze at most these"
            )
        self.arch = arch
        self._freeze_stages()

    @property
    def unbuilt_parts(self) -> tuple[str, ...]:
        """Beginnings of the keys of the layers behind the last of `out_indices`, which a whole model's file has."""
        return tuple(f"layers.{index}." for index in range(len(self.layers), len(self.layer_setting)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Put out the maps of `out_indices`: (B, 3, height, width) -> (B, C, H, W) each.

        Raises:
            InputError: if x is no such batch of images.
        """
        check_maps(x, 3)
        return super().forward(x)

    def train(self, mode: bool = True) -> "PlainEfficientNet":
        """Switch mode as mmdet's EfficientNet does, for every kind of batch norm, and return the module."""
        super().train(mode)
        if mode and self.norm_eval:
            evaluate_batch_norms(self)
        return self


@MODELS.register_module()
class MRLAEfficientNet(PlainEfficientNet):
    """EfficientNet whose blocks query what the earlier blocks of their stage saw (MRLA, ICLR 2023).

    Layer attention follows the blocks that have a shortcut, and only those; it is dropped in training together with
    its block (`drop_path_rate`). Checkpointing (`with_cp`) and freezing (`frozen_stages`, `norm_eval`) cover it as
    they cover the block. A `norm_cfg` with requires_grad=False does not reach the branches, which would never learn.

    Args:
        arch: "b0" to "b8", or the EdgeTPU models "es", "em", "el".
        layer_attention: config of the variant, ``dict(type="MRLALight", head_channels=8)`` by default.
        zero_init_attention: start each branch as an exact identity, so that plain weights keep their meaning.
        **kwargs: those of `PlainEfficientNet`.

    Raises:
        InputError: for an unknown arch or variant, heads that do not divide the channels of a stage, or more frozen
            stages than are built for `out_indices`.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import MRLAEfficientNet
        >>> backbone = MRLAEfficientNet("b0", out_indices=(2, 3, 4, 5)).eval()
        >>> for level in backbone(torch.rand(1, 3, 64, 96)):
        ...     print(tuple(level.shape))
        (1, 24, 16, 24)
        (1, 40, 8, 12)
        (1, 112, 4, 6)
        (1, 320, 2, 3)
    """

    def __init__(
        self,
        arch: str = "b0",
        layer_attention: dict | None = None,
        *,
        zero_init_attention: bool = True,
        **kwargs: object,
    ) -> None:
        check_arguments(dict(zero_init_attention=zero_init_attention), dict(zero_init_attention=FLAG))
        super().__init__(arch, **kwargs)
        default = dict(type="MRLALight", head_channels=8)
        self.layer_attention = default if layer_attention is None else layer_attention
        self.zero_init_attention = zero_init_attention
        # mmengine's list passes init_weights on to the branches; the first and last layers are single convolutions
        self.layers = ModuleList(
            self.add_layer_attention(layer) if isinstance(layer, Sequential) else layer for layer in self.layers
        )
        self._freeze_stages()

    def add_layer_attention(self, layer: Sequential) -> MRLAMBConvLayer:
        """Exchange the blocks of a layer for those with layer attention."""
        blocks, first_in_stage = [], True
        for block in layer:
            mrla = self.make_branch(block, first_in_stage) if has_shortcut(block) else None
            blocks.append(MRLAMBConv(block, mrla))
            first_in_stage = mrla is None
        return MRLAMBConvLayer(*blocks)

    def make_branch(self, block: InvertedResidual | EdgeResidual, first_in_stage: bool) -> LayerAttentionResidual:
        """Build the residual branch of a block; the block draws for both which samples to drop."""
        *_, last = block.children()
        return LayerAttentionResidual(
            self.layer_attention,
            last.conv.out_channels,
            norm_cfg=self.norm_cfg,
            zero_init=self.zero_init_attention,
            first_in_stage=first_in_stage,
        )
