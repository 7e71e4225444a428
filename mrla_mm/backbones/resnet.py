"""ResNet with layer attention after every block, on mmdet's ResNet."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mmdet.models.backbones.resnet import BasicBlock, Bottleneck, ResNet
from mmdet.models.layers import ResLayer
from mmengine.model.efficient_conv_bn_eval import efficient_conv_bn_eval_control
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.attention import (
    AttentionConfig,
    LayerAttentionResidual,
    attention_config,
    stage_pattern,
)
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.errors import InputError
from mrla_mm.registry import register
from mrla_mm.weights import PretrainedBackbone


class _MRLABlock:
    """Mixin that turns a residual block of mmdet into one with layer attention.

    The stage sets `mrla`, the layer attention's residual branch or None.
    """

    efficient_conv_bn_eval = False

    def forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run block and layer attention: x and the stage's memory -> both after the block."""
        return run_checkpointed(self.with_cp, self._forward, x, *memory)

    def _forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        shortcut = self.run_shortcut(x)
        x = self.run_convs(x)
        x += shortcut
        x = self.relu(x)
        if self.mrla is None:
            return (x, *memory)
        return self.mrla(x, shortcut, *memory)

    def run_shortcut(self, x: Tensor) -> Tensor:
        """Run the identity path: (B, C', H', W') -> (B, C, H, W)."""
        if self.downsample is None:
            return x
        if not self.efficient_conv_bn_eval:
            return self.downsample(x)
        *before, conv, norm = self.downsample
        for module in before:
            x = module(x)
        return self.run_conv_bn(conv, norm, x)

    def run_convs(self, x: Tensor, *context: Tensor) -> Tensor:
        """Run convolutions, norms and plugins: (B, C', H', W') -> (B, C, H, W); see `run_conv`."""
        maps = []
        for step in range(1, self.num_convs + 1):
            x = self.run_conv(step, x, *context)
            if step < self.num_convs:
                x = self.relu(x)
            x = self.run_plugins(step, x, maps)
        return x

    def run_conv(self, step: int, x: Tensor) -> Tensor:
        """Run the convolution and norm of a step; a subclass may also use the context."""
        conv = getattr(self, f"conv{step}")
        norm = getattr(self, f"norm{step}")
        return self.run_conv_bn(conv, norm, x)

    def run_conv_bn(self, conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        """Run a convolution and its norm, as one convolution where requested and possible."""
        can_fold = type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d
        if self.efficient_conv_bn_eval and can_fold and norm.running_mean is not None:
            return efficient_conv_bn_eval_control(norm, conv, x)
        return norm(conv(x))

    def run_plugins(self, step: int, x: Tensor, maps: list[Tensor]) -> Tensor:
        """Run the plugins of a step; a subclass may collect the outputs of the steps in `maps`."""
        names = getattr(self, f"after_conv{step}_plugin_names", ())
        return self.forward_plugin(x, names) if names else x


class MRLABasicBlock(_MRLABlock, BasicBlock):
    """Basic block of ResNet-18 and -34 with layer attention; like mmdet's it takes no plugins."""

    num_convs = 2


class MRLABottleneck(_MRLABlock, Bottleneck):
    """Bottleneck of ResNet-50, -101 and -152 with layer attention."""

    num_convs = 3


def build_with_contracted_dilation(
    block: type[nn.Module], *, dilation: int, **kwargs: object
) -> nn.Module:
    """Build a block of `ResLayer` with half the dilation if it is the first: given a downsample.

    A dilation set on a built block would not reach the layers inside a deformable convolution.
    """
    is_first = "downsample" in kwargs
    return block(dilation=max(dilation // 2, 1) if is_first else dilation, **kwargs)


class MRLAResLayer(ResLayer):
    """Stage of a ResNet: its blocks pass on a memory, which starts empty at every call.

    Args:
        make_branch: builds the residual branch of a block, given its channels and `first_in_stage`;
            None for a plain stage.
        **kwargs: those of mmdet's ``ResLayer``, with a block class that calls layer attention.
    """

    def __init__(self, *, make_branch: Callable[..., nn.Module] | None, **kwargs: object) -> None:
        super().__init__(**kwargs)
        if kwargs["plugins"]:
            remove_unselected_plugins(self, kwargs["plugins"])
        channels = kwargs["planes"] * self.block.expansion
        for index, block in enumerate(self):
            block.mrla = make_branch(channels, first_in_stage=index == 0) if make_branch else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks: (B, C', H', W') -> (B, C, H, W)."""
        return run_blocks(self, x)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Run the blocks of a stage, which pass on a memory: (B, C', H', W') -> (B, C, H, W)."""
    memory = ()
    for block in blocks:
        out = block(x, *memory)
        x, *memory = out if isinstance(out, tuple) else (out,)  # a map alone if replaced
    return x


def remove_unselected_plugins(stage: ResLayer, plugins: Sequence[dict]) -> None:
    """Remove plugins from the blocks that their entry does not name."""
    every = range(len(stage))
    for number in (1, 2, 3):
        entries = [plugin for plugin in plugins if plugin["position"] == f"after_conv{number}"]
        for index, block in enumerate(stage):
            names = getattr(block, f"after_conv{number}_plugin_names")
            for name, plugin in zip(tuple(names), entries, strict=True):
                chosen = [every[place] for place in plugin.get("blocks", every)]  # from either end
                if index not in chosen:
                    names.remove(name)
                    delattr(block, name)


@register(MODELS)
class MRLAResNet(PretrainedBackbone, ResNet):
    """ResNet whose blocks attend to the earlier blocks of their stage (MRLA, ICLR 2023).

    `with_cp`, `frozen_stages` and `norm_eval` cover a block's layer attention as they cover the
    block. A `norm_cfg` with requires_grad=False does not: after a norm frozen at zero, layer
    attention would never learn. An entry of `plugins` may name the blocks of a stage that get it:
    ``blocks=(-2,)`` is the last but one.

    Args:
        depth: 18, 34, 50, 101 or 152.
        layer_attention: config of the variant, or its name alone; by default MRLALight with
            head_channels=32. None or False for a plain ResNet, in which the other arguments of
            layer attention have no effect.
        attention_drop_path: probability of dropping the layer attention of a block, and nothing
            else, for a sample in training: 0.2 for ImageNet (App. B.1), 0 for COCO.
        zero_init_attention: start each branch as an exact identity, whatever `init_cfg` says of
            norms, so that plain ResNet weights keep their outputs. If False, the weight of a
            branch's norm starts at one.
        stages: regular expression; stages whose name, "layer1" to "layer4", it does not match
            entirely have no layer attention.
        efficient_conv_bn_eval: in the blocks, where a norm is frozen, run it and the convolution
            before it as one convolution, mmengine's way: less memory in training, more small
            operations. The forward hooks of both are passed over. mmengine's own key of this name
            cannot trace the branches.
        contract_dilation: halve the dilation of the first block of each stage, as mmseg's
            ``ResNet`` does.
        **kwargs: those of mmdet's ``ResNet``.

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

    key_layout = "resnet"  # the layout of published weight files, see mrla_mm.weights
    block_classes = {BasicBlock: MRLABasicBlock, Bottleneck: MRLABottleneck}

    def __init__(
        self,
        depth: int,
        layer_attention: AttentionConfig = "MRLALight",
        *,
        attention_drop_path: float = 0.0,
        zero_init_attention: bool = True,
        stages: str = ".*",
        efficient_conv_bn_eval: bool = False,
        contract_dilation: bool = False,
        **kwargs: object,
    ) -> None:
        if depth not in self.arch_settings:
            depths = ", ".join(map(str, self.arch_settings))
            raise InputError(f"depth={depth!r}: there are ResNets of {depths} layers")
        # mmdet's constructor calls make_res_layer for each stage, which reads these.
        self.layer_attention = attention_config(layer_attention)
        self.attention_drop_path = attention_drop_path
        self.zero_init_attention = zero_init_attention
        self.stages = stage_pattern(stages)
        self.efficient_conv_bn_eval = efficient_conv_bn_eval
        self.contract_dilation = contract_dilation
        super().__init__(depth, **kwargs)
        is_matched = any(map(self.stages.fullmatch, self.res_layers))
        if self.layer_attention is not None and not is_matched:
            raise InputError(f"stages={stages!r} matches none of {', '.join(self.res_layers)}")

    def make_res_layer(self, **kwargs: object) -> MRLAResLayer:
        """Build a stage of our blocks in place of mmdet's."""
        make_branch = None
        name = f"layer{len(self.res_layers) + 1}"
        if self.layer_attention is not None and self.stages.fullmatch(name):
            make_branch = partial(
                LayerAttentionResidual,
                self.layer_attention,
                norm_cfg=self.norm_cfg,
                drop_path=self.attention_drop_path,
                zero_init=self.zero_init_attention,
            )
        block = self.block_classes[kwargs["block"]]
        if self.contract_dilation:
            expansion = block.expansion
            block = partial(build_with_contracted_dilation, block)
            block.expansion = expansion  # which ResLayer reads
        stage = MRLAResLayer(make_branch=make_branch, **{**kwargs, "block": block})
        for block in stage:
            block.efficient_conv_bn_eval = self.efficient_conv_bn_eval
        return stage
