"""Where a patch of a vision transformer looks: the attention maps of its heads (the paper's figure in App. B.5).

The models attend by scaled_dot_product_attention, which keeps no weights; they are computed anew from what went in:

    A_h = softmax(q_h k_h^T / sqrt(d))      rows sum to 1 over all tokens, class token among them
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.patches import Rectangle
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn

from mrla_mm.analysis.layer_attention_plots import shown_heads
from mrla_mm.analysis.panels import lay_map_over, panel_figure, save, set_title
from mrla_mm.errors import InputError


class PatchAttention(NamedTuple):
    """What the heads of a layer do at one query patch.

    Attributes:
        model: name of the model.
        layer: number of the layer, from 1.
        patch: row and column of the query, from 0.
        cell: height and width of a patch in pixels.
        maps: (G, H, W), attention to each patch.
        extra: (G, E), attention to the extra tokens (class, distillation).
        picture: (height, width, 3) uint8, RGB, what the model saw.
    """

    model: str
    layer: int
    patch: tuple[int, int]
    cell: tuple[float, float]
    maps: Tensor
    extra: Tensor
    picture: np.ndarray


class TokenRecorder:
    """Keep what goes into the attention of a layer of a vision transformer, as the model runs inside.

    Args:
        model: with a `VisionTransformer` of mmpretrain inside, as `ViT`, `MRLAViT`, `CeiT` and `MRLACeiT` are.
        layer: number of the layer from 1, or from the end if negative.

    Raises:
        InputError: the model has no vision transformer, or no such layer.

    Example:
        >>> import torch
        >>> from mrla_mm.analysis.vit_attention import TokenRecorder
        >>> from mrla_mm.backbones import MRLAViT
        >>> backbone = MRLAViT("deit-tiny").eval()
        >>> with torch.no_grad(), TokenRecorder(backbone) as recorder:
        ...     _ = backbone(torch.rand(1, 3, 96, 160))
        >>> maps, extra = recorder.attention_of((2, 5))
        >>> tuple(maps.shape), tuple(extra.shape)
        ((3, 6, 10), (3, 1))
    """

    def __init__(self, model: nn.Module, layer: int = -1) -> None:
        found = [module for module in model.modules() if isinstance(module, VisionTransformer)]
        if not found:
            raise InputError(f"{type(model).__name__} has no vision transformer: give a config with ViT, CeiT or DeiT")
        self.backbone = found[0]
        depth = self.backbone.num_layers
        self.layer = layer + depth + 1 if layer < 0 else layer
        if not 1 <= self.layer <= depth:
            raise InputError(f"layer {layer}: the model has layers 1 to {depth}")
        self.attention = self.backbone.layers[self.layer - 1].attn
        self._handles = []

    def __enter__(self) -> "TokenRecorder":
        """Start to listen."""
        self._handles = [
            self.backbone.register_forward_pre_hook(self._keep_image),
            self.backbone.patch_embed.register_forward_hook(self._keep_grid),
            self.attention.register_forward_pre_hook(self._keep_tokens),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        """Stop to listen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep_image(self, backbone, args) -> None:
        self._image_size = args[0].shape[2:]

    def _keep_grid(self, embed, args, result) -> None:
        self.grid = tuple(int(side) for side in result[1])
        strides = embed.projection.stride
        self.cell = tuple(
            stride * max(1, round(pixels / embedded))  # a stem before the patches has a stride of its own
            for stride, pixels, embedded in zip(strides, self._image_size, args[0].shape[2:], strict=True)
        )

    def _keep_tokens(self, attention, args) -> None:
        self._tokens = args[0].detach()

    @torch.no_grad()
    def weights(self, query: int | slice = slice(None)) -> Tensor:
        """Attention weights of the last batch's query tokens, class token first: (B, G, queries, tokens)."""
        attention, tokens = self.attention, self._tokens
        qkv = attention.qkv(tokens).unflatten(-1, (3, attention.num_heads, attention.head_dims))  # (B, N, 3, G, d)
        q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # (B, G, N, d) each
        q = q[:, :, query] if isinstance(query, slice) else q[:, :, query : query + 1]
        return (q @ k.transpose(-1, -2) / math.sqrt(attention.head_dims)).softmax(-1)

    def attention_of(self, patch: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Attention of a patch (row, column) of the last batch's first image: to patches (G, H, W), to extras (G, E).

        Raises:
            InputError: the grid has no such patch.
        """
        (height, width), (row, column) = self.grid, patch
        if not (0 <= row < height and 0 <= column < width):
            raise InputError(
                f"patch {row} {column} lies outside the {height} x {width} grid: rows are 0 to {height - 1}, columns "
                f"0 to {width - 1}"
            )
        extra = self._tokens.shape[1] - height * width
        weights = self.weights(extra + row * width + column)[0, :, 0].cpu()  # (G, N)
        return weights[:, extra:].unflatten(-1, (height, width)), weights[:, :extra]


def plot_heads(found: Sequence[PatchAttention], out_file: str | Path, *, max_heads: int = 6) -> Path:
    """Draw a row for each model: what it saw with the query patch in a red box, and the maps of its heads.

    A colour goes from 0 to the largest weight of a map, which its title states.

    Args:
        found: what each model does at the patch.
        out_file: picture to write; its folder is made.
        max_heads: how many heads to draw, spread evenly over all.
    """
    columns = 1 + max(min(len(one.maps), max_heads) for one in found)
    figure, grid = panel_figure(len(found), columns, found[0].picture)
    for row, one in enumerate(found):
        height, width = one.picture.shape[:2]
        grid[row, 0].imshow(one.picture, extent=(0, width, height, 0))
        set_title(grid[row, 0], one.model, f"layer {one.layer}, patch {one.patch[0]} {one.patch[1]}")
        draw_query(grid[row, 0], one)
        for axes, head in zip(grid[row, 1:], shown_heads(len(one.maps), max_heads), strict=False):
            draw_head(axes, one, head)
    return save(figure, out_file)


def draw_query(axes, one: PatchAttention) -> None:
    """Draw a box around the query patch."""
    corner = one.patch[1] * one.cell[1], one.patch[0] * one.cell[0]
    axes.add_patch(Rectangle(corner, one.cell[1], one.cell[0], fill=False, edgecolor="red", linewidth=1.5))


def draw_head(axes, one: PatchAttention, head: int) -> None:
    """Lay the map of a head over the picture."""
    weights = one.maps[head].numpy()
    size = weights.shape[0] * one.cell[0], weights.shape[1] * one.cell[1]
    lay_map_over(axes, weights, one.picture, size=size, vmin=0)
    draw_query(axes, one)
    extra = f"extra tokens {float(one.extra[head].sum()):.2f}" if one.extra.shape[-1] else ""
    set_title(axes, f"head {head + 1}, max {weights.max():.3f}", extra)


def write_csv(rows: Sequence[tuple[str, PatchAttention]], out_file: str | Path) -> Path:
    """Write a line for each image, model, head and patch; those of extra tokens have no row and column."""
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    with out_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "model", "layer", "query_row", "query_column", "head", "row", "column", "weight"])
        for image, one in rows:
            for head, (extra, weights) in enumerate(zip(one.extra.tolist(), one.maps.tolist(), strict=True), 1):
                start = [image, one.model, one.layer, *one.patch, head]
                writer.writerows([*start, "", "", f"{weight:.6g}"] for weight in extra)
                for row, line in enumerate(weights):
                    writer.writerows([*start, row, column, f"{weight:.6g}"] for column, weight in enumerate(line))
    return out_file
