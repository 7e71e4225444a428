"""ResNet with layer attention after every block, on mmdet's ResNet."""

from collections.abc import Callable

from mmdet.models.backbones.resnet import BasicBlock, Bottleneck, ResNet
from mmdet.models.layers import ResLayer
from mmengine.registry import MODELS
from torch import Tensor, is_grad_enabled
from torch.utils.checkpoint import checkpoint

from mrla_mm.arguments import (
    CONFIG,
    DICT,
    FLAG,
    INIT,
    MAP_NORM,
    RATE,
    Rule,
    check_arguments,
    check_keywords,
    check_maps,
    indices,
    is_list,
    naming,
    one_of,
    optional,
    whole,
    wholes,
)
from mrla_mm.attention import LayerAttentionResidual, Memory
from mrla_mm.backbones.conv_bn import conv_bn, run_downsample
from mrla_mm.errors import InputError

RESNET_RULES = dict(
    attention_drop_path=RATE,
    zero_init_attention=FLAG,
    in_channels=whole(1),
    stem_channels=optional(whole(2)),
    base_channels=whole(1),
    num_stages=whole(1, 4),
    style=one_of("pytorch", "caffe"),
    conv_cfg=optional(CONFIG),
    norm_cfg=MAP_NORM,
    dcn=optional(CONFIG),
    init_cfg=INIT,
    plugins=optional(Rule("a list of dicts", lambda value: is_list(value) and all(map(DICT.holds, value)))),
    **dict.fromkeys(("deep_stem", "avg_down", "norm_eval", "with_cp", "zero_init_residual"), FLAG),
)


def per_stage(stages: int) -> dict[str, Rule]:
    """Rules of the arguments that have something for each stage."""
    return dict(
        strides=wholes(1, stages),
        dilations=wholes(1, stages),
        out_indices=indices(stages),
        frozen_stages=whole(-1, stages),
        stage_with_dcn=Rule(
            f"a list of {stages} flags",
            lambda value: is_list(value) and len(value) == stages and all(map(FLAG.holds, value)),
        ),
    )


class _MRLABlock:
    """What turns a residual block of mmdet into one that feeds layer attention; mixed into both kinds.

    The stage sets `mrla`, the layer attention's residual branch.
    """

    num_convs: int
    mrla: LayerAttentionResidual

    def forward(self, x: Tensor, memory: Memory = None) -> tuple[Tensor, Memory]:
        """Run block and layer attention: x and the stage's memory -> the output (B, C, H, W) and the new memory."""
        if self.with_cp and is_grad_enabled():
            return checkpoint(self._forward, x, memory, use_reentrant=False)
        return self._forward(x, memory)

    def _forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        shortcut = x if self.downsample is None else run_downsample(self.downsample, x)
        for step in range(1, self.num_convs + 1):
            x = conv_bn(getattr(self, f"conv{step}"), getattr(self, f"norm{step}"), x)
            if step < self.num_convs:
                x = self.relu(x)
            if self.plugins and (names := getattr(self, f"after_conv{step}_plugin_names")):
                x = self.forward_plugin(x, names)
        return self.mrla.forward_add_relu(x, shortcut, self.relu, memory)


class MRLABasicBlock(_MRLABlock, BasicBlock):
    """Basic block of ResNet-18 and -34 with layer attention."""

    num_convs = 2
    plugins = None  # mmdet's basic block refuses them


class MRLABottleneck(_MRLABlock, Bottleneck):
    """Bottleneck of ResNet-50, -101 and -152 with layer attention."""

    num_convs = 3


class MRLAResLayer(ResLayer):
    """Stage of blocks; its memory starts empty at every call and lives for that call.

    Args:
        make_branch: builds a block's residual branch from its channels and whether it is the stage's first.
        **kwargs: those of mmdet's ``ResLayer``, with a block class that has layer attention.
    """

    def __init__(self, *, make_branch: Callable[[int, bool], LayerAttentionResidual], **kwargs: object) -> None:
        super().__init__(**kwargs)
        channels = kwargs["planes"] * self.block.expansion
        for index, block in enumerate(self):
            block.mrla = make_branch(channels, index == 0)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks: (B, C', H', W') -> (B, C, H, W)."""
        memory = None
        for block in self:
            x, memory = block(x, memory)
        return x


@MODELS.register_module()
class MRLAResNet(ResNet):
    """ResNet whose blocks query what the earlier blocks of their stage saw (MRLA, ICLR 2023).

    Takes every argument of mmdet's ``ResNet``. Activation checkpointing (`with_cp`) and freezing (`frozen_stages`,
    `norm_eval`) cover the layer attention of a block as they cover the block. A `norm_cfg` with requires_grad=False
    does not reach the branches, which would never learn.

    Args:
        depth: 18, 34, 50, 101 or 152.
        layer_attention: config of the variant, ``dict(type="MRLALight", head_channels=32)`` by default.
        attention_drop_path: probability to drop the layer attention of a block, and nothing else, for a sample in
            training: 0.2 for ImageNet (App. B.1), 0 for COCO.
        zero_init_attention: start each branch as an exact identity, so that plain ResNet weights keep their meaning.
        **kwargs: those of mmdet's ``ResNet``.

    Raises:
        InputError: for an unknown variant, one whose heads do not divide the channels of a stage, or an argument of
            ``ResNet`` that this depth cannot have.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import MRLAResNet
        >>> backbone = MRLAResNet(50, layer_attention=dict(type="MRLABase")).eval()
        >>> for level in backbone(torch.rand(1, 3, 64, 96)):
        ...     print(tuple(level.shape))
        (1, 256, 16, 24)
        (1, 512, 8, 12)
        (1, 1024, 4, 6)
        (1, 2048, 2, 3)
    """

    key_layout = "resnet"  # of the files its weights are published in, see mrla_mm.weights
    block_classes = {BasicBlock: MRLABasicBlock, Bottleneck: MRLABottleneck}

    def __init__(
        self,
        depth: int,
        layer_attention: dict | None = None,
        *,
        attention_drop_path: float = 0.0,
        zero_init_attention: bool = True,
        **kwargs: object,
    ) -> None:
        if layer_attention is None:
            layer_attention = dict(type="MRLALight", head_channels=32)
        check_keywords(type(self), kwargs)
        own = dict(attention_drop_path=attention_drop_path, zero_init_attention=zero_init_attention)
        self.check(depth, **own, **kwargs)
        self.layer_attention = layer_attention
        self.attention_drop_path = attention_drop_path
        self.zero_init_attention = zero_init_attention
        with naming(self, dict(depth=depth, layer_attention=layer_attention, **kwargs)):
            super().__init__(depth, **kwargs)
        self.in_channels = kwargs.get("in_channels", 3)

    @classmethod
    def check(cls, depth: int, **kwargs: object) -> None:
        """Raise InputError for arguments that mmdet's ResNet ends on, or ignores, without naming them."""
        if not isinstance(depth, int) or depth not in cls.arch_settings:
            raise InputError(f"depth={depth!r} is unknown; use one of {', '.join(map(str, cls.arch_settings))}")
        stages = kwargs.get("num_stages", 4)
        check_arguments(dict(num_stages=stages), RESNET_RULES)
        defaults = dict(strides=(1, 2, 2, 2), dilations=(1, 1, 1, 1), out_indices=(0, 1, 2, 3))
        check_arguments({**(defaults if stages < 4 else {}), **kwargs}, RESNET_RULES | per_stage(stages))
        basic = cls.arch_settings[depth][0] is BasicBlock
        for name in ("dcn", "plugins", "style"):
            if basic and kwargs.get(name, "pytorch") not in (None, [], "pytorch"):
                raise InputError(
                    f"{name}={kwargs[name]!r} needs bottleneck blocks, which depth={depth} does not have; "
                    "use 50 or more"
                )
        deformed, placed = kwargs.get("dcn") is not None, any(kwargs.get("stage_with_dcn", ()))
        if deformed != placed:
            raise InputError(
                f"dcn={kwargs.get('dcn')!r} and stage_with_dcn={kwargs.get('stage_with_dcn')!r} need each other: the "
                "convolution, and True for each stage that gets it"
            )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Put out the maps of `out_indices`: (B, in_channels, height, width) -> (B, C, H, W) each.

        Raises:
            InputError: if x is no such batch of images.
        """
        check_maps(x, self.in_channels)
        return super().forward(x)

    def make_res_layer(self, **kwargs: object) -> MRLAResLayer:
        """Build a stage, its blocks exchanged for those with layer attention."""

        def make_branch(channels: int, first_in_stage: bool) -> LayerAttentionResidual:
            return LayerAttentionResidual(
                self.layer_attention,
                channels,
                norm_cfg=self.norm_cfg,
                drop_path=self.attention_drop_path,
                zero_init=self.zero_init_attention,
                first_in_stage=first_in_stage,
            )

        kwargs["block"] = self.block_classes[kwargs["block"]]
        return MRLAResLayer(make_branch=make_branch, **kwargs)

    def train(self, mode: bool = True) -> "MRLAResNet":
        """Switch mode as mmdet's ResNet does, and return the module, which it does not."""
        super().train(mode)
        return self
