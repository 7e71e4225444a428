"""Simple feature pyramid: every level of a detector from the one map of a plain vision transformer."""

import math
from collections.abc import Sequence

import mmpretrain.models  # noqa: F401  registers the default norm
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_norm_layer
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.arguments import INIT, MAP_NORM, check_arguments, check_maps, is_list, is_whole, naming, optional, whole
from mrla_mm.errors import InputError

LAYER_NORM = dict(type="mmpretrain.LN2d", eps=1e-6)
RULES = dict(
    in_channels=whole(1), out_channels=whole(1), in_stride=whole(1), norm_cfg=optional(MAP_NORM), init_cfg=INIT
)


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """Pyramid of one map, without a top-down path (Li et al., Exploring Plain Vision Transformer Backbones, 2022).

    A level of 1/4 or 1/2 of the map's stride is deconvolved from it, one of the same stride is the map itself, one of
    twice the stride its 2x2 maximum; a 1x1 and a 3x3 convolution, each with a norm, follow. Coarser levels take every
    second pixel of the level before them.

    Args:
        in_channels: C of the map.
        out_channels: channels of every level.
        strides: of the levels, in pixels of the image, each twice the one before it.
        in_stride: stride of the map: the patch size of the backbone.
        norm_cfg: config of the norms, over the channels of a pixel by default; None for none.
        init_cfg: see mmengine's ``BaseModule``.

    Raises:
        InputError: for a value that cannot work, naming it.

    Example:
        >>> import torch
        >>> from mrla_mm.necks import SimpleFeaturePyramid
        >>> neck = SimpleFeaturePyramid(192, 256)
        >>> for level in neck((torch.rand(1, 192, 6, 10),)):
        ...     print(tuple(level.shape))
        (1, 256, 24, 40)
        (1, 256, 12, 20)
        (1, 256, 6, 10)
        (1, 256, 3, 5)
        (1, 256, 2, 3)
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
        own = dict(in_channels=in_channels, out_channels=out_channels, in_stride=in_stride, norm_cfg=norm_cfg)
        check_arguments({**own, "init_cfg": init_cfg}, RULES)
        super().__init__(init_cfg)
        check_strides(strides, in_stride)
        fine = [stride for stride in strides if stride <= 2 * in_stride]
        if not fine:
            raise InputError(f"strides={list(strides)} must begin at {2 * in_stride}, twice in_stride, or below")
        self.in_channels = in_channels
        self.extra_levels = len(strides) - len(fine)
        with naming(self, dict(in_channels=in_channels, out_channels=out_channels, norm_cfg=norm_cfg)):
            self.levels = ModuleList(
                make_level(in_channels, out_channels, stride / in_stride, norm_cfg=norm_cfg) for stride in fine
            )

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn one map (B, C, H, W), alone in its sequence, into the levels (B, out_channels, H', W')."""
        if len(maps) != 1:
            raise InputError(f"the pyramid takes one map, got {len(maps)}; set the backbone's out_indices to one block")
        check_maps(maps[0], self.in_channels, what="maps")
        outs = [level(maps[0]) for level in self.levels]
        for _ in range(self.extra_levels):
            outs.append(F.max_pool2d(outs[-1], kernel_size=1, stride=2))
        return tuple(outs)


def check_strides(strides: Sequence[int], in_stride: int) -> None:
    """Raise InputError unless the strides double from in_stride / 4, in_stride / 2, ... on."""
    sound = is_list(strides) and len(strides) > 0 and all(is_whole(stride, 1) for stride in strides)
    doubling = sound and all(b == 2 * a for a, b in zip(strides, strides[1:], strict=False))
    ratio = math.log2(strides[0] / in_stride) if doubling else math.nan
    if not doubling or ratio < -2 or not ratio.is_integer():
        raise InputError(
            f"strides={strides!r} must each be twice the one before and begin at a quarter of "
            f"in_stride={in_stride}, or at a doubling of that"
        )


def make_level(in_channels: int, out_channels: int, scale: float, *, norm_cfg: dict | None) -> nn.Sequential:
    """Layers from a map to a level of `scale` times its stride."""
    halvings = max(0, round(-math.log2(scale)))
    if in_channels % 2**halvings:
        raise InputError(f"in_channels={in_channels} cannot be halved {halvings} times, as the finest level needs")
    layers, channels = [], in_channels
    for step in range(halvings):
        if step:
            layers += [] if norm_cfg is None else [build_norm_layer(norm_cfg, channels)[1]]
            layers.append(nn.GELU())
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2))
        channels //= 2
    if scale > 1:
        layers.append(nn.MaxPool2d(2, stride=2, ceil_mode=True))
    layers.append(ConvModule(channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None))
    layers.append(ConvModule(out_channels, out_channels, 3, padding=1, norm_cfg=norm_cfg, act_cfg=None))
    return nn.Sequential(*layers)
