"""Heat maps and tables of layer-attention scores."""

import csv
import os.path
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from mrla_mm.analysis.layer_attention import StageScores

ANNOTATED_LAYERS = 8  # stages of more layers have no room for numbers
SOFTMAX_KINDS = ("MRLABase", "MLA", "LinearRLA")


def stage_title(number: int, stage: StageScores) -> str:
    """Name a stage by its number and the part of the model its layers share."""
    names = [name.removesuffix(".mrla").removesuffix(".attention") for name in stage.layers]
    shared = os.path.commonprefix([name.split(".") for name in names]) if len(names) > 1 else names[0].split(".")[:-1]
    first, last = (name.split(".")[-1] for name in (names[0], names[-1]))
    blocks = f"block {first}" if len(names) == 1 else f"blocks {first}-{last}"
    return f"stage {number}: {'.'.join(shared) or 'model'}, {blocks}"


def shown_heads(heads: int, limit: int) -> list[int]:
    """Indices of at most `limit` heads, spread evenly."""
    return sorted({round(index) for index in np.linspace(0, heads - 1, min(heads, limit))})


def colours(stage: StageScores, weights: np.ndarray) -> tuple[str, Normalize]:
    """Colour map and range: 0 to 1 for softmax, to the largest weight for light, both ways where some are negative."""
    if stage.kind in SOFTMAX_KINDS:
        return "viridis", Normalize(0, 1)
    largest = max(float(np.nanmax(np.abs(weights))), 1e-6)
    return ("RdBu_r", Normalize(-largest, largest)) if np.nanmin(weights) < 0 else ("viridis", Normalize(0, largest))


def draw_matrix(axes, weights: np.ndarray, title: str, colour_map: str, norm: Normalize, *, annotate: bool):
    """Draw a (T, T) matrix: a row for each layer, a column for each it attends to, layers counted from 1."""
    layers = len(weights)
    palette = matplotlib.colormaps[colour_map].with_extremes(bad="0.93")
    image = axes.imshow(np.ma.masked_invalid(weights), cmap=palette, norm=norm, aspect="equal")
    axes.set_title(title, fontsize=9)
    step = max(1, -(-layers // 12))
    ticks = list(range(0, layers, step))
    axes.set_xticks(ticks, [str(tick + 1) for tick in ticks], fontsize=8)
    axes.set_yticks(ticks, [str(tick + 1) for tick in ticks], fontsize=8)
    axes.tick_params(length=2)
    if annotate:
        for row in range(layers):
            for column in range(row + 1):
                red, green, blue, _ = palette(norm(weights[row, column]))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                text = f"{weights[row, column]:.2f}".replace("-0.00", "0.00")
                colour = "white" if dark else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    return image


def plot_stage(stage: StageScores, number: int, out_file: str | Path, *, max_heads: int = 16) -> Path:
    """Draw a stage: the mean over all heads first, then single heads.

    Args:
        stage: what a recorder found.
        number: of the stage, from 1.
        out_file: picture to write; its folder is made.
        max_heads: how many single heads to draw, spread evenly over all.
    """
    weights = stage.weights.numpy()
    heads, layers = weights.shape[:2]
    chosen = shown_heads(heads, max_heads)
    panels = [(f"mean of {heads} heads", weights.mean(0))] if heads > 1 else []
    panels += [(f"head {head + 1}", weights[head]) for head in chosen]
    columns = min(6, len(panels))
    rows = -(-len(panels) // columns)
    annotate = layers <= ANNOTATED_LAYERS
    side = max(1.8, 0.38 * layers) if annotate else 2.4
    figure = Figure(figsize=(max(columns * (side + 0.35) + 1.2, 4.6), rows * (side + 0.55) + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    colour_map, norm = colours(stage, np.stack([panel for _, panel in panels]))
    for axes, (title, panel) in zip(grid.flat, panels, strict=False):
        image = draw_matrix(axes, panel, title, colour_map, norm, annotate=annotate)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(f"{stage.kind}, {stage_title(number, stage)}", fontsize=11)
    return finish(figure, image, grid, out_file)


def plot_overview(stages: Sequence[StageScores], out_file: str | Path) -> Path:
    """Draw all stages side by side, each the mean over its heads."""
    sides = [max(1.8, 0.38 * len(stage.layers)) if len(stage.layers) <= ANNOTATED_LAYERS else 3.0 for stage in stages]
    figure = Figure(figsize=(sum(sides) + 0.5 * len(sides) + 1.6, max(sides) + 1.2), layout="constrained")
    grid = figure.subplots(1, len(stages), squeeze=False, width_ratios=sides)
    means = [stage.weights.numpy().mean(0) for stage in stages]
    colour_map, norm = colours(stages[0], np.concatenate([mean.ravel() for mean in means]))
    for number, (axes, mean) in enumerate(zip(grid.flat, means, strict=True), 1):
        annotate = len(mean) <= ANNOTATED_LAYERS
        image = draw_matrix(axes, mean, f"stage {number}", colour_map, norm, annotate=annotate)
    figure.suptitle(f"{stages[0].kind}: mean over heads", fontsize=11)
    return finish(figure, image, grid, out_file)


def finish(figure: Figure, image, grid: np.ndarray, out_file: str | Path) -> Path:
    """Add labels and colour bar, and write the picture."""
    figure.supxlabel("attends to layer", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, label="weight")
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_file, dpi=130)
    return out_file


def write_csv(stages: Sequence[StageScores], out_file: str | Path) -> Path:
    """Write a line for each stage, head, layer and layer it attends to, all counted from 1."""
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    with out_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "variant", "head", "layer", "layer_name", "attends_to", "attends_to_name", "weight"])
        for number, stage in enumerate(stages, 1):
            for head, matrix in enumerate(stage.weights.tolist(), 1):
                for t, name in enumerate(stage.layers):
                    for s in range(t + 1):
                        earlier = stage.layers[s]
                        weight = f"{matrix[t][s]:.6g}"
                        writer.writerow([number, stage.kind, head, t + 1, name, s + 1, earlier, weight])
    return out_file
