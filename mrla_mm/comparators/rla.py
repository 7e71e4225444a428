"""RLA_g: a hidden state that runs along the depth of a ResNet, beside its maps."""

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmdet.models.layers import ResLayer
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.backbones.conv_bn import run_downsample
from mrla_mm.backbones.resnet import keep_chosen
from mrla_mm.comparators.resnet import ComparatorResNet, GatedBottleneck


class RLABottleneck(GatedBottleneck):
    """Bottleneck that reads the hidden state and returns its last convolution too, which updates the state."""

    def _forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        shortcut = x if self.downsample is None else run_downsample(self.downsample, x)
        out = self.run_convs(x, self.mrla.read(memory))
        return self.relu(out + shortcut), out


class Aggregation(nn.Module):
    """What RLA adds to a block; what a stage shares is in its first block.

    Args:
        conv: the block's first convolution. `read` is its part for the hidden state: together they
            are the convolution of the concatenation, without the copy, and `conv` keeps the weights
            of a plain ResNet.
        hidden_channels: K, channels of the hidden state.
        norm: of the update behind this block; None if nothing reads the state afterwards, since an
            unused parameter would stop DistributedDataParallel.
        shared_channels: of the stage's maps; 0 for later blocks.
    """

    def __init__(
        self, conv: nn.Conv2d, hidden_channels: int, norm: nn.Module | None, shared_channels: int
    ) -> None:
        super().__init__()
        self.read = nn.Conv2d(hidden_channels, conv.out_channels, 1, conv.stride, bias=False)
        self.norm = norm
        if shared_channels:
            self.write = nn.Conv2d(shared_channels, hidden_channels, 1, bias=False)
            self.recurrent = nn.Conv2d(hidden_channels, hidden_channels, 3, padding=1, bias=False)


class RLAResLayer(ResLayer):
    """Stage of an RLAResNet.

    Args:
        hidden_channels: K.
        update_last: update the state after the last block too: where a later stage or the
            classifier reads it.
        **kwargs: those of mmdet's ``ResLayer``.
    """

    def __init__(self, *, hidden_channels: int, update_last: bool, **kwargs: object) -> None:
        super().__init__(**{**kwargs, "block": RLABottleneck})
        keep_chosen(self, kwargs["plugins"] or ())
        for index, block in enumerate(self):
            updates = update_last or index < len(self) - 1
            norm = build_norm_layer(kwargs["norm_cfg"], hidden_channels)[1] if updates else None
            block.mrla = Aggregation(
                block.conv1, hidden_channels, norm, 0 if index else 4 * kwargs["planes"]
            )

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the blocks: x (B, C', H', W') and h (B, K, H', W'), zero in the first stage -> both behind the stage."""
        shared = self[0].mrla
        if not isinstance(inputs, tuple):
            inputs = (
                inputs,
                inputs.new_zeros(inputs.shape[0], shared.read.in_channels, *inputs.shape[2:]),
            )
        x, hidden = inputs
        for block in self:
            x, y = block(x, hidden)
            if block.stride > 1:
                hidden = F.avg_pool2d(hidden, block.stride, ceil_mode=True, count_include_pad=False)
            if block.mrla.norm is not None:
                hidden = shared.recurrent(block.mrla.norm(hidden + shared.write(y)).tanh())
        return x, hidden


@MODELS.register_module(force=True)
class RLAResNet(ComparatorResNet):
    """ResNet with recurrent layer aggregation, RLA_g (Zhao et al., NeurIPS 2021).

    A hidden state of a few channels joins the input of each block, h^t = W tanh(BN^t(h^{t-1} + V
    y^t)) for its last convolution y^t, with V and W shared in the stage. It starts at zero, runs
    through all stages and is pooled where they are.

    Args:
        depth: 50, 101 or 152.
        hidden_channels: K, channels of the hidden state.
        out_hidden: concatenate the last level with the hidden state, behind norm and ReLU: for a
            classifier.
        **kwargs: those of mmdet's ``ResNet``.
    """

    def __init__(
        self, depth: int, hidden_channels: int = 32, *, out_hidden: bool = False, **kwargs: object
    ) -> None:
        self.hidden_channels, self.out_hidden = hidden_channels, out_hidden
        super().__init__(depth, None, **kwargs)
        if out_hidden:
            self.out_norm = build_norm_layer(self.norm_cfg, hidden_channels)[1]
        else:  # which the classifier's weights have
            last = self.res_layers[-1]
            self.unbuilt_parts = [f"{last}.{len(getattr(self, last)) - 1}.mrla.norm."]

    def make_res_layer(self, **kwargs: object) -> RLAResLayer:
        """Build a stage of our blocks in place of mmdet's."""
        is_last = kwargs["planes"] == self.base_channels * 2 ** (self.num_stages - 1)
        options = dict(
            hidden_channels=self.hidden_channels, update_last=self.out_hidden or not is_last
        )
        return RLAResLayer(**kwargs, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the network: (B, 3, H, W) -> its levels."""
        *levels, (last, hidden) = super().forward(x)
        last = torch.cat([last, self.out_norm(hidden).relu()], 1) if self.out_hidden else last
        return (*(level for level, _ in levels), last)
