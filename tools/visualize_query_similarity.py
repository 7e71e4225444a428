#!/usr/bin/env python
"""Draw how similar the queries of consecutive layers are, for one or more models.

  visualize_query_similarity.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--compare CONFIG2 CHECKPOINT2]...

Writes histograms.png (a row for each model, a panel for each stage) and similarities.csv (every
layer and head).
"""

import csv
import sys

import numpy as np
import torch
from matplotlib.figure import Figure

from mrla_mm import cli
from mrla_mm.analysis.query_similarity import QueryRecorder


def parse_args(argv):
    """Parse the command line."""
    parser = cli.picture_parser("visualize_query_similarity", __doc__, compare=True)
    said = "leave out pairs with a stage's first layer, as the paper does"
    parser.add_argument("--skip-first", action="store_true", help=said)
    return parser.parse_args(argv)


def plot_histograms(models, out_file):
    """Draw a row of histograms for each named model, a panel for each stage, on the same axes."""
    columns = max(stage.number for _, stages in models for stage in stages)
    figure = Figure(figsize=(3 * columns + 0.9, 2.2 * len(models) + 0.8), layout="constrained")
    grid = figure.subplots(len(models), columns, squeeze=False, sharex=True, sharey=True)
    for row, (name, stages) in enumerate(models):
        grid[row, 0].set_ylabel(f"{name}\n% of pairs", fontsize=9)
        for stage in stages:
            axes = grid[row, stage.number - 1]
            values = stage.values.flatten().numpy()
            share = np.full(len(values), 100 / len(values))
            median = np.median(values)
            axes.hist(values, bins=25, range=(0, 1), weights=share, color=f"C{row}", alpha=0.8)
            axes.axvline(median, color="black", linewidth=1, linestyle="--")
            title = f"stage {stage.number}: {len(values)} pairs, median {median:.2f}"
            axes.set_title(title, fontsize=9)
    figure.supxlabel("|cosine similarity| of a head's queries in consecutive layers", fontsize=10)
    figure.savefig(out_file, dpi=130)


def write_csv(models, out_file):
    """Write the mean, minimum and maximum over the images for each model, stage, layer and head."""
    with out_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        place = "model", "stage", "layer", "layer_name", "head"
        writer.writerow([*place, "images", "mean", "min", "max"])
        for name, stages in models:
            for stage in stages:
                for index, head in np.ndindex(*stage.values.shape[1:]):
                    values = stage.values[:, index, head]
                    place = stage.number, stage.first + index, stage.layers[index], head + 1
                    figures = values.mean(), values.min(), values.max()
                    row = [name, *place, len(values), *(f"{value:.6g}" for value in figures)]
                    writer.writerow(row)


def main(argv=None):
    """Run the models over the images, and draw the similarities of their queries."""
    args = parse_args(argv)
    images = cli.chosen_images(args)
    found = []
    for loaded in cli.load_models(args):
        with torch.no_grad(), QueryRecorder(loaded.model) as recorder:
            for path in images:
                loaded.model.extract_feat(loaded.prepare(path).inputs)
                print(loaded.name, path.name, flush=True)
        found.append((loaded.name, recorder.stages(skip_first=args.skip_first)))
    plot_histograms(found, args.out_dir / f"histograms.{args.format}")
    write_csv(found, args.out_dir / "similarities.csv")
    print(f"{len(images)} image(s), written: {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
