"""RLA_g: a hidden state that runs along the depth of a ResNet, beside its maps."""

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn

from mrla_mm.backbones.resnet import MRLAResLayer
from mrla_mm.comparators.resnet import ComparatorResNet, GatedBottleneck
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS

HIDDEN_CHANNELS = 32  # K, of the hidden state


class RLABottleneck(GatedBottleneck):
    """Bottleneck that reads the hidden state."""

    def _forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.relu(self.run_convs(x, hidden) + self.run_shortcut(x))

    def run_conv(self, step: int, x: Tensor, hidden: Tensor) -> Tensor:
        """Run the convolution and norm of a step; the first one reads the hidden state too."""
        if step > 1:
            return super().run_conv(step, x)
        return self.norm1(self.conv1(x) + self.mrla.read(hidden))


class Aggregation(nn.Module):
    """What RLA adds to a block; what a stage shares is in its first block.

    Args:
        conv: the block's first convolution. `read` is its part for the hidden state: together they
            are the convolution of the concatenation, without the copy, and `conv` keeps the weights
            of a plain ResNet.
        norm: of the update after this block; None if nothing reads the state afterwards, since an
            unused parameter would stop DistributedDataParallel.
        shared_channels: of the stage's maps; 0 for later blocks.
    """

    def __init__(self, conv: nn.Conv2d, norm: nn.Module | None, shared_channels: int) -> None:
        super().__init__()
        self.norm = norm  # before the convolutions: mmcv's fuse_conv_bn looks for one above it
        self.read = nn.Conv2d(HIDDEN_CHANNELS, conv.out_channels, 1, conv.stride, bias=False)
        if shared_channels:
            self.write = nn.Conv2d(shared_channels, HIDDEN_CHANNELS, 1, bias=False)
            self.recurrent = nn.Conv2d(HIDDEN_CHANNELS, HIDDEN_CHANNELS, 3, padding=1, bias=False)


class RLAResLayer(MRLAResLayer):
    """Stage of an RLAResNet.

    Args:
        update_last: update the state after the last block too: where a later stage or the
            classifier reads it.
    """

    def __init__(self, *, update_last: bool, **kwargs: object) -> None:
        super().__init__(make_branch=None, **{**kwargs, "block": RLABottleneck})
        for index, block in enumerate(self):
            updates = update_last or index < len(self) - 1
            norm = build_norm_layer(kwargs["norm_cfg"], HIDDEN_CHANNELS)[1] if updates else None
            block.mrla = Aggregation(block.conv1, norm, 0 if index else 4 * kwargs["planes"])
            # This norm is that of two convolutions, so fuse_conv_bn must not find it below one.
            block._modules = {block.norm1_name: block.norm1, **block._modules}

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the blocks: x (B, C', H', W') and h (B, K, H', W') -> both after the stage."""
        shared = self[0].mrla
        for block in self:
            x = block(x, hidden)
            if block.stride > 1:
                hidden = F.avg_pool2d(hidden, block.stride, ceil_mode=True)
            if block.mrla.norm is not None:
                hidden = shared.recurrent(block.mrla.norm(hidden + shared.write(x)).tanh())
        return x, hidden


@MODELS.register_module()
class RLAResNet(ComparatorResNet):
    """ResNet with recurrent layer aggregation, RLA_g (Zhao et al., NeurIPS 2021).

    A hidden state of 32 channels joins the input of each block, h^t = W tanh(BN^t(h^{t-1} + V
    x^t)) for its output x^t, with V and W shared in the stage. It starts at zero, runs through all
    stages and is pooled where they are. The paper writes V y^t for the last convolution y^t; the
    authors' code adds the shortcut to y^t in place before, and so do all their figures and weights.

    Args:
        depth: 50, 101 or 152.
        out_hidden: concatenate the last level with the hidden state, after norm and ReLU: for a
            classifier.
        **kwargs: those of mmdet's ``ResNet``.
    """

    def __init__(self, depth: int, *, out_hidden: bool = False, **kwargs: object) -> None:
        if depth not in (50, 101, 152):
            raise InputError(f"depth={depth!r} must be 50, 101 or 152: others have no bottlenecks")
        # mmdet's constructor calls make_res_layer for each stage, which reads it
        self.out_hidden = out_hidden
        super().__init__(depth, None, **kwargs)
        if out_hidden:
            self.out_norm = build_norm_layer(self.norm_cfg, HIDDEN_CHANNELS)[1]
        else:  # which the classifier's weights have
            last = self.res_layers[-1]
            self.unbuilt_parts = (f"{last}.{len(getattr(self, last)) - 1}.mrla.norm.",)

    def make_res_layer(self, **kwargs: object) -> RLAResLayer:
        """Build a stage of our blocks in place of mmdet's."""
        update_last = self.out_hidden or len(self.res_layers) < self.num_stages - 1
        return RLAResLayer(update_last=update_last, **kwargs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the network: (B, 3, H, W) -> its levels."""
        x = self.stem(x) if self.deep_stem else self.relu(self.norm1(self.conv1(x)))
        x = self.maxpool(x)
        hidden = torch.zeros_like(x[:, :1]).expand(-1, HIDDEN_CHANNELS, -1, -1)
        levels = []
        for index, name in enumerate(self.res_layers[: max(self.out_indices) + 1]):
            x, hidden = getattr(self, name)(x, hidden)
            if index in self.out_indices:
                levels.append(x)
        if self.out_hidden:
            levels[-1] = torch.cat([x, self.out_norm(hidden).relu()], 1)
        return tuple(levels)
