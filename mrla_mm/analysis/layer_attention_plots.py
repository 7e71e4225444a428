"""Heat maps and tables of layer-attention scores."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from mrla_mm.analysis.layer_attention import StageScores


def draw(panels: Mapping[str, np.ndarray], title: str, out_file: str | Path) -> None:
    """Draw (T, T) matrices on one colour scale, diverging if there are negative weights."""
    values = np.concatenate([matrix.ravel() for matrix in panels.values()])
    largest = max(float(np.nanmax(np.abs(values))), 1e-6)
    has_negative = np.nanmin(values) < 0
    norm = Normalize(-largest if has_negative else 0, largest)
    palette = matplotlib.colormaps["RdBu_r" if has_negative else "viridis"]
    palette = palette.with_extremes(bad="0.93")
    columns = min(6, len(panels))
    rows = -(-len(panels) // columns)
    side = max(2.2, 0.38 * min(8, max(map(len, panels.values()))))
    size = columns * (side + 0.4) + 1.4, rows * (side + 0.6) + 0.9
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, matrix) in zip(grid.flat, panels.items(), strict=False):
        last = len(matrix) + 0.5  # layers count from 1
        extent = (0.5, last, last, 0.5)
        image = axes.imshow(np.ma.masked_invalid(matrix), cmap=palette, norm=norm, extent=extent)
        axes.set_title(name, fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("attends to layer", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, label="weight")
    figure.savefig(out_file, dpi=130)


def plot_overview(stages: Sequence[StageScores], out_file: str | Path) -> None:
    """Draw all stages side by side, each the mean over its heads."""
    means = [stage.weights.numpy().mean(0) for stage in stages]
    panels = {f"stage {number}": mean for number, mean in enumerate(means, 1)}
    draw(panels, f"{stages[0].kind}: mean over heads", out_file)


def plot_stage(stage: StageScores, number: int, out_file: str | Path, max_heads: int) -> None:
    """Draw at most `max_heads` heads of a stage, evenly spaced."""
    weights = stage.weights.numpy()
    heads = np.linspace(0, len(weights) - 1, min(len(weights), max_heads)).round().astype(int)
    panels = {f"head {head + 1}": weights[head] for head in heads}
    layers = f"{len(stage.layers)} layers from {stage.layers[0]}"
    draw(panels, f"{stage.kind}, stage {number}: {layers}", out_file)


def write_csv(stages: Sequence[StageScores], out_file: str | Path) -> None:
    """Write a line for each stage, head, layer and layer it attends to, all counted from 1."""
    with Path(out_file).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        layers = "layer", "layer_name", "attends_to", "attends_to_name"
        writer.writerow(["stage", "variant", "head", *layers, "weight"])
        for number, stage in enumerate(stages, 1):
            for head, t, s in np.argwhere(stage.weights.isfinite().numpy()):
                row = [number, stage.kind, head + 1, t + 1, stage.layers[t], s + 1, stage.layers[s]]
                writer.writerow([*row, f"{stage.weights[head, t, s]:.6g}"])
