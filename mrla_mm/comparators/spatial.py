"""Attention over pixels: A2, a plugin, and AA, in place of 3x3 convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrla_mm.comparators.channel import reduced_channels
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS

AA_HEADS = 8


@MODELS.register_module()
class A2(nn.Module):
    """Double attention: gather features, distribute them to the pixels (Chen et al., NeurIPS 2018).

    x + W (A softmax_pixels(B)^T) softmax_descriptors(V) with 1x1 convolutions A, B, V of x.

    Args:
        reduction: A has C // reduction channels, and there are as many descriptors. 2 gives a
            ResNet-50 of 32.9 M, with blocks 0 and 2 of the second stage and 0, 2 and 4 of the
            third.
    """

    def __init__(self, in_channels: int, reduction: int = 2) -> None:
        super().__init__()
        inner = reduced_channels(in_channels, reduction)
        self.features, self.gather, self.distribute = (
            nn.Conv2d(in_channels, inner, 1) for _ in range(3)
        )
        self.out = nn.Conv2d(inner, in_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the attention: (B, C, H, W) -> (B, C, H, W)."""
        gather = self.gather(x).flatten(2).softmax(2)  # (B, M, N) over the N pixels
        distribute = self.distribute(x).flatten(2).softmax(1)  # (B, M, N) over the M descriptors
        descriptors = self.features(x).flatten(2) @ gather.transpose(1, 2)  # (B, C / r, M)
        return x + self.out((descriptors @ distribute).unflatten(2, x.shape[2:]))


@MODELS.register_module()
class AA(nn.Module):
    """Convolution augmented by attention over pixels (Bello et al., ICCV 2019).

    Eight heads attend with relative positions, softmax(q^T (k + r_rows + r_columns) / sqrt(D)) v.
    The keys have a fifth of the output's channels, but a head at least 20. The values have a tenth,
    and take the place of as many channels of the convolution. With a stride the heads attend on the
    input pooled to the output's grid. It replaces a bottleneck's 3x3 convolution, in mmdet's
    ResNet, MRLAResNet and ComparatorResNet: ``dcn=dict(type="mrla_mm.AA"), stage_with_dcn=(False,
    True, True, True)``.

    Args:
        max_grid: largest height and width of the output.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        *,
        max_grid: int = 28,
        **conv: object,
    ) -> None:
        super().__init__()
        keys = max(20, int(0.2 * out_channels / AA_HEADS))
        values = AA_HEADS * max(1, int(0.1 * out_channels / AA_HEADS))
        self.stride = stride
        self.max_grid = max_grid
        self.sizes = (AA_HEADS * keys, AA_HEADS * keys, values)
        self.conv = nn.Conv2d(in_channels, out_channels - values, kernel_size, stride, **conv)
        self.qkv = nn.Conv2d(in_channels, sum(self.sizes), 1, bias=False)
        self.out = nn.Conv2d(values, values, 1, bias=False)
        self.rows, self.columns = (
            nn.Parameter(torch.randn(2 * max_grid - 1, keys) * keys**-0.5) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and attend: (B, C', H', W') -> (B, C, H, W)."""
        convolved = self.conv(x)
        if self.stride > 1:
            x = F.avg_pool2d(x, 3, self.stride, padding=1)
        attended = self.attend(*self.qkv(x).split(self.sizes, 1))
        return torch.cat([convolved, self.out(attended)], 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over pixels: query and key (B, G D, H, W), value (B, C, H, W) -> (B, C, H, W)."""
        height, width = query.shape[2:]
        if max(height, width) > self.max_grid:
            raise InputError(f"max_grid={self.max_grid} is below {height} x {width}, this map's")
        query, key, value = (x.unflatten(1, (AA_HEADS, -1)) for x in (query, key, value))
        query = query / query.shape[2] ** 0.5  # (B, G, D, H, W)
        content = torch.einsum("bgdyx,bgdvu->bgyxvu", query, key)
        row_logits = torch.einsum("bgdyx,yvd->bgyxv", query, self.distances(self.rows, height))
        column_logits = torch.einsum("bgdyx,xud->bgyxu", query, self.distances(self.columns, width))
        logits = content + row_logits[..., None] + column_logits[..., None, :]
        weights = logits.flatten(4).softmax(4).view_as(logits)
        return torch.einsum("bgyxvu,bgdvu->bgdyx", weights, value).flatten(1, 2)

    def distances(self, table: Tensor, size: int) -> Tensor:
        """Embedding of each pair's distance: (2 max_grid - 1, D) -> (size, size, D)."""
        position = torch.arange(size, device=table.device)
        return table[position[None] - position[:, None] + self.max_grid - 1]
