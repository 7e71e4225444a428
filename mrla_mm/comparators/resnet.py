"""ResNet for the comparators: plugins, gates by the contract of layer attention, strict weights."""

from mmdet.models.backbones.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from mrla_mm.attention import AttentionConfig, attention_config
from mrla_mm.backbones.resnet import MRLABasicBlock, MRLABottleneck, MRLAResLayer
from mrla_mm.comparators.channel import BA
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS
from mrla_mm.weights import PretrainedBackbone


class _Gated:
    """Mixin of a block whose layer attention, if any, acts before the shortcut is added."""

    def _forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        shortcut = self.run_shortcut(x)
        x = self.run_convs(x)
        if self.mrla is not None:
            x, memory = self.mrla(x, shortcut, memory)
        return (self.relu(x + shortcut), *memory)

    def run_plugins(self, step: int, x: Tensor, maps: list[Tensor]) -> Tensor:
        """Run the plugins after the convolution of a step; BA gets the maps of earlier steps."""
        for name in getattr(self, f"after_conv{step}_plugin_names", ()):
            plugin = getattr(self, name)
            x = plugin(x, maps) if isinstance(plugin, BA) else plugin(x)
        maps.append(x)
        return x


class GatedBasicBlock(_Gated, MRLABasicBlock):
    """Basic block with a gate."""


class GatedBottleneck(_Gated, MRLABottleneck):
    """Bottleneck with a gate and plugins."""


@MODELS.register_module()
class ComparatorResNet(PretrainedBackbone, ResNet):
    """mmdet's ResNet, as strict about weights as MRLAResNet, for other attention.

    Args:
        depth: 18, 34, 50, 101 or 152; as in mmdet `plugins` need 50 or more.
        layer_attention: config of a gate with the contract of layer attention, such as
            ``dict(type="mrla_mm.DIA")``. It gets a block's last convolution, and the block adds the
            shortcut to what it returns.
    """

    key_layout = "resnet"
    block_classes = {BasicBlock: GatedBasicBlock, Bottleneck: GatedBottleneck}

    def __init__(
        self, depth: int, layer_attention: AttentionConfig = None, **kwargs: object
    ) -> None:
        # mmdet's constructor calls make_res_layer for each stage, which reads it
        self.layer_attention = attention_config(layer_attention)
        super().__init__(depth, **kwargs)

    def make_res_layer(self, **kwargs: object) -> MRLAResLayer:
        """Build a stage of our blocks in place of mmdet's."""
        block = self.block_classes[kwargs["block"]]
        make_gate = self.make_gate if self.layer_attention is not None else None
        return MRLAResLayer(make_branch=make_gate, **{**kwargs, "block": block})

    def make_gate(self, channels: int, first_in_stage: bool) -> nn.Module:
        """Build the gate of a block."""
        gate = MODELS.build(
            dict(**self.layer_attention, channels=channels, first_in_stage=first_in_stage)
        )
        if getattr(gate, "activation", None):
            raise InputError(f"{type(gate).__name__} is a residual branch, not a gate: MRLAResNet")
        return gate
