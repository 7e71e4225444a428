"""Gates on channels: SE, ECA, CBAM and BA, plugins of a residual block.

All but BA go into the blocks of mmdet's ResNet and of MRLAResNet by mmcv's mechanism,
``plugins=[dict(cfg=dict(type="mrla_mm.ECA"), position="after_conv3")]``: after the last
convolution and before the shortcut. The block sets `in_channels`, C of the map.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mrla_mm.attention.base import eca_kernel_size
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS


def reduced_channels(channels: int, reduction: int) -> int:
    """Channels of a bottleneck, channels // reduction."""
    if not 1 <= reduction <= channels:
        raise InputError(f"reduction={reduction} must be from 1 to the map's {channels} channels")
    return channels // reduction


def gate_channels(x: Tensor, logits: Tensor) -> Tensor:
    """Weigh the channels of x (B, C, H, W) by sigmoid(logits), (B, C)."""
    return x * logits.sigmoid()[..., None, None]


@MODELS.register_module()
class SE(nn.Module):
    """Squeeze and excitation, x sigmoid(W2 relu(W1 GAP(x))) without biases (Hu et al., CVPR 2018).

    Args:
        reduction: W1 projects C to C // reduction channels.
    """

    def __init__(self, in_channels: int, reduction: int = 16) -> None:
        super().__init__()
        hidden = reduced_channels(in_channels, reduction)
        self.squeeze = nn.Linear(in_channels, hidden, bias=False)
        self.excite = nn.Linear(hidden, in_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the channels: (B, C, H, W) -> (B, C, H, W)."""
        return gate_channels(x, self.excite(self.squeeze(x.mean((2, 3))).relu()))


@MODELS.register_module()
class ECA(nn.Module):
    """Efficient channel attention, x sigmoid(Conv1d(GAP(x))) (Wang et al., CVPR 2020)."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        size = eca_kernel_size(in_channels)
        self.conv = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the channels: (B, C, H, W) -> (B, C, H, W)."""
        return gate_channels(x, self.conv(x.mean((2, 3))[:, None])[:, 0])


@MODELS.register_module()
class CBAM(nn.Module):
    """Convolutional block attention: gates on channels and pixels (Woo et al., ECCV 2018).

    Channels: sigmoid(MLP(avg x) + MLP(max x)) over the grid. Pixels: sigmoid of a 7x7 convolution
    of the mean and the maximum over the channels.

    Args:
        reduction: the MLP's inner layer has C // reduction channels.
    """

    def __init__(self, in_channels: int, reduction: int = 16) -> None:
        super().__init__()
        hidden = reduced_channels(in_channels, reduction)
        self.mlp = nn.Sequential(
            nn.Linear(in_channels, hidden), nn.ReLU(), nn.Linear(hidden, in_channels)
        )
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh channels and pixels: (B, C, H, W) -> (B, C, H, W)."""
        x = gate_channels(x, self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))
        pixels = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)  # (B, 2, H, W)
        return x * self.conv(pixels).sigmoid()


@MODELS.register_module()
class BA(nn.Module):
    """Bridge attention: a gate from all convolutions of the block (Zhao et al., ECCV 2022).

    x sigmoid(W relu(sum_i BN_i(W_i GAP(x_i)))), where x_i are the outputs of the block's
    convolutions, after norm and ReLU, and the last of them is x. A plugin of `ComparatorResNet`
    alone, whose blocks pass the earlier outputs on.

    Args:
        reduction: the W_i project to C // reduction channels.
    """

    def __init__(self, in_channels: int, reduction: int = 16) -> None:
        super().__init__()
        hidden = reduced_channels(in_channels, reduction)
        widths = (in_channels // 4, in_channels // 4, in_channels)  # of a bottleneck's convolutions
        self.squeeze = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden))
            for width in widths
        )
        self.excite = nn.Linear(hidden, in_channels, bias=False)

    def forward(self, x: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Weigh the channels of x (B, C, H, W), given earlier maps (B, C / 4, H', W')."""
        maps = (*earlier, x)
        bridged = sum(
            squeeze(each.mean((2, 3))) for squeeze, each in zip(self.squeeze, maps, strict=True)
        )
        return gate_channels(x, self.excite(bridged.relu()))
