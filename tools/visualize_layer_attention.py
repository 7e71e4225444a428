#!/usr/bin/env python
"""Draw how much each layer attends to each earlier one of its stage.

  visualize_layer_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--out-dir DIR]

Writes overview.png (each stage, mean over its heads), stage<n>.png (its heads) and scores.csv
(every number), for an image or the mean over a folder.
"""

import csv
import sys
import textwrap

import matplotlib
import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from mrla_mm import cli
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder

MAX_HEADS = 16  # to draw of a stage


def parse_args(argv):
    """Parse the command line."""
    return cli.picture_parser("visualize_layer_attention", __doc__, compare=False).parse_args(argv)


def draw(panels, title, out_file):
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
        is_readable = len(matrix) <= 8
        for t, s in np.argwhere(np.isfinite(matrix) & is_readable):
            label = dict(ha="center", va="center", fontsize=7, bbox=dict(fc="white", lw=0, pad=1))
            axes.text(s + 1, t + 1, f"{matrix[t, s].round(2) + 0.0:.2f}", **label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.suptitle(textwrap.fill(title, int(11 * size[0])), fontsize=11)
    figure.supxlabel("attends to layer", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, label="weight")
    figure.savefig(out_file, dpi=130)


def plot_stage(stage, number, out_file):
    """Draw the heads of a stage, or as many as are readable, evenly spaced."""
    weights = stage.weights.numpy()
    heads = np.linspace(0, len(weights) - 1, min(len(weights), MAX_HEADS)).round().astype(int)
    panels = {f"head {head + 1}": weights[head] for head in heads}
    layers = f"{len(stage.layers)} layers from {stage.layers[0]}"
    draw(panels, f"{stage.kind}, stage {number}: {layers}", out_file)


def write_csv(stages, out_file):
    """Write a line for each stage, head, layer and layer it attends to, all counted from 1."""
    with out_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        layers = "layer", "layer_name", "attends_to", "attends_to_name"
        writer.writerow(["stage", "variant", "head", *layers, "weight"])
        for number, stage in enumerate(stages, 1):
            for head, t, s in np.argwhere(stage.weights.isfinite().numpy()):
                row = [number, stage.kind, head + 1, t + 1, stage.layers[t], s + 1, stage.layers[s]]
                writer.writerow([*row, f"{stage.weights[head, t, s]:.6g}"])


def main(argv=None):
    """Run the model over the images, and draw what its layers attended to."""
    args = parse_args(argv)
    images = cli.chosen_images(args)
    (loaded,) = cli.load_models(args)
    with torch.no_grad(), LayerAttentionRecorder(loaded.model) as recorder:
        for path in images:
            loaded.model.extract_feat(loaded.prepare(path).inputs)
            print(path.name, flush=True)
    stages = recorder.stages()
    means = {}
    for number, stage in enumerate(stages, 1):
        means[f"stage {number}"] = stage.weights.numpy().mean(0)
        plot_stage(stage, number, args.out_dir / f"stage{number}.{args.format}")
    draw(means, f"{stages[0].kind}: mean over heads", args.out_dir / f"overview.{args.format}")
    write_csv(stages, args.out_dir / "scores.csv")
    print(f"mean over {len(images)} image(s), written: {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
