"""How the multiply-adds of layer attention grow: with the number of pixels, and with the depth of a stage."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor, nn

from mrla_mm.analysis.complexity import fit_line, measure
from mrla_mm.attention import LayerAttentionResidual

VARIANTS = {"MLA": "MLA", "base": "MRLABase", "light": "MRLALight"}


class AttentionStage(nn.Module):
    """Stage of layer attention alone: each layer's output is the next one's input.

    Args:
        variant: registered name of the layer attention.
        depth: number T of layers.
        channels: C of the maps.
    """

    def __init__(self, variant: str, depth: int, *, channels: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            LayerAttentionResidual(dict(type=variant), channels, norm_cfg=dict(type="BN"), first_in_stage=not index)
            for index in range(depth)
        )
        self.channels = channels

    def forward(self, image: Tensor) -> Tensor:
        """Run the layers on maps (B, C, H / 16, W / 16), as in the third stage of a ResNet."""
        x, memory = image.new_zeros(len(image), self.channels, *(side // 16 for side in image.shape[2:])), None
        for layer in self.layers:
            x, memory = layer(x, x, memory)
        return x


def by_resolution(
    plain: Callable[[], nn.Module], attended: Callable[[], nn.Module], sizes: Sequence[int]
) -> list[tuple[int, float]]:
    """Multiply-adds [G] that layer attention adds to a model, for square images.

    Args:
        plain: builds the model without layer attention.
        attended: builds it with layer attention.
        sizes: sides of the images.

    Returns:
        list: (number of pixels, multiply-adds in billions) by size.
    """
    models = plain(), attended()
    points = []
    for size in sizes:
        without, with_attention = (measure(model, (size, size)).total for model in models)
        points.append((size * size, (with_attention - without) / 1e9))
    return points


def by_depth(depths: Sequence[int], *, size: int = 224) -> dict[str, list[tuple[int, float]]]:
    """Multiply-adds [G] of MLA, base and light in a stage of T layers with 1024 channels at a 16th of the image's size.

    Returns:
        dict: (depth, multiply-adds in billions) by variant.
    """
    return {
        name: [(depth, measure(AttentionStage(variant, depth), (size, size)).total / 1e9) for depth in depths]
        for name, variant in VARIANTS.items()
    }


def plot_resolution(points: Sequence[tuple[int, float]], out_file: str | Path, *, title: str) -> Path:
    """Draw multiply-adds against pixels with the fitted line."""
    slope, offset, explained = fit_line(*zip(*points, strict=True))
    figure, axes = new_axes(title, "pixels of the image [thousands]", "added multiply-adds [M]")
    pixels = [0, points[-1][0]]
    line = f"{slope * 1e9:.1f} a pixel, {offset * 1e3:+.2f} M ($R^2$ = {explained:.6f})"
    axes.plot([x / 1e3 for x in pixels], [1e3 * (slope * x + offset) for x in pixels], color="tab:gray", label=line)
    axes.plot([x / 1e3 for x, _ in points], [1e3 * y for _, y in points], "o", color="tab:blue", label="counted")
    axes.set(xlim=(0, None), ylim=(0, None))
    return save(figure, axes, out_file)


def plot_depth(series: Mapping[str, Sequence[tuple[int, float]]], out_file: str | Path, *, title: str) -> Path:
    """Draw multiply-adds against the depth of a stage, a curve for each variant."""
    figure, axes = new_axes(title, "layers of the stage", "multiply-adds [G], logarithmic")
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
    axes.set(xscale="log", yscale="log")
    depths = [depth for depth, _ in next(iter(series.values()))]
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    return save(figure, axes, out_file)


def new_axes(title: str, xlabel: str, ylabel: str):
    """Return a figure and its axes."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Figure, axes, out_file: str | Path) -> Path:
    """Write a figure with its legend; its folder is made."""
    axes.legend(frameon=False, fontsize=9)
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_file, dpi=130)
    return out_file
