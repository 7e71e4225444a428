"""Simple feature pyramid: all levels of a detector from the one map of a vision transformer."""

from collections.abc import Sequence

import mmpretrain.models  # noqa: F401  registers LN2d
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_norm_layer
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.errors import InputError

LAYER_NORM = dict(type="mmpretrain.LN2d", eps=1e-6)
# How often the map's stride is halved, by the ratio of a level's stride to it.
HALVINGS = {0.25: 2, 0.5: 1, 1: 0, 2: -1}


@MODELS.register_module(force=True)
class SimpleFeaturePyramid(BaseModule):
    """Pyramid of one map, without a top-down path (ViTDet, Li et al., ECCV 2022).

    The level of the map's own stride is the map itself, finer ones are deconvolved by 2 or 4, the
    next coarser one is its 2x2 maximum; a 1x1 and a 3x3 convolution follow, each with a norm. The
    rest take every second pixel.

    Args:
        strides: strides of the levels in pixels of the image, each twice the one before, and the
            first between in_stride / 4 and 2 in_stride.
        in_stride: stride of the map: the patch size of the backbone.
        norm_cfg: config of the norms, by default over the channels of each pixel; None for none.

    Example:
        >>> import torch
        >>> from mrla_mm.necks import SimpleFeaturePyramid
        >>> neck = SimpleFeaturePyramid(192, 256)
        >>> [tuple(level.shape[2:]) for level in neck((torch.rand(1, 192, 6, 10),))]
        [(24, 40), (12, 20), (6, 10), (3, 5), (2, 3)]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        strides: Sequence[int] = (4, 8, 16, 32, 64),
        in_stride: int = 16,
        norm_cfg: dict | None = LAYER_NORM,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        ratios = [stride / in_stride for stride in strides]
        doubled = [ratios[0] * 2**level for level in range(len(ratios))]
        if ratios[0] not in HALVINGS or ratios != doubled:
            start = f"between in_stride={in_stride} / 4 and twice it"
            raise InputError(f"strides={strides} must double, starting {start}")
        halvings = [HALVINGS[ratio] for ratio in ratios if ratio in HALVINGS]
        self.extra_levels = len(ratios) - len(halvings)
        self.levels = ModuleList(
            make_level(in_channels, out_channels, number, norm_cfg) for number in halvings
        )

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn a sequence of one map (B, C, H, W) into levels (B, out_channels, H', W')."""
        (x,) = maps
        outs = [level(x) for level in self.levels]
        for _ in range(self.extra_levels):
            outs.append(F.max_pool2d(outs[-1], kernel_size=1, stride=2))
        return tuple(outs)


def make_level(
    in_channels: int, out_channels: int, halvings: int, norm_cfg: dict | None
) -> nn.Sequential:
    """Build the layers to a level: its stride is halved 2, 1 or 0 times, or doubled (-1)."""
    layers = []
    channels = in_channels
    for step in range(halvings):
        if step:
            layers += [] if norm_cfg is None else [build_norm_layer(norm_cfg, channels)[1]]
            layers.append(nn.GELU())
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2))
        channels //= 2
    if halvings < 0:
        layers.append(nn.MaxPool2d(2, stride=2, ceil_mode=True))
    cfg = dict(norm_cfg=norm_cfg, act_cfg=None)
    layers.append(ConvModule(channels, out_channels, 1, **cfg))
    layers.append(ConvModule(out_channels, out_channels, 3, padding=1, **cfg))
    return nn.Sequential(*layers)
