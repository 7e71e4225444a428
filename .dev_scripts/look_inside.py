#!/usr/bin/env python
"""Draw what detectors of blood cells learnt: layer attention and lambda.

`python .dev_scripts/look_inside.py --data-root bccd` runs the checkpoints that tools/compare.py
left of .dev_scripts/bccd over the test images, prints the figures of docs/analysis.md and writes
layer_attention.png and inside.png of docs/_static.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.runner import find_latest_checkpoint
from pycocotools.coco import COCO

from measure import as_markdown
from mrla_mm import cli, inference
from mrla_mm.analysis.compare.run import initial_weights
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder

KINDS = {"mrla_base": "MRLA-base", "mrla_light": "MRLA-light"}


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="look_inside.py", description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, required=True, help="BCCD in COCO's format")
    parser.add_argument("--seeds", type=int, default=5, help="two at least")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/compare"))
    return parser.parse_args(argv)


def load(kind, seed, args):
    """Return a detector with what prepares its images."""
    config = args.out / kind / f"{kind}.py"
    checkpoint = find_latest_checkpoint(config.with_name(f"seed_{seed}"))
    return inference.load_model(str(config), checkpoint, device="cpu")


def record(loaded, images):
    """Return a (G, T, T) map for each stage, the mean over the images."""
    with torch.no_grad(), LayerAttentionRecorder(loaded.model) as recorder:
        for path in images:
            loaded.model.extract_feat(loaded.prepare(path).inputs)
    return [stage.weights.numpy() for stage in recorder.stages()]


def with_initial_queries(loaded, seed):
    """Give the detector the queries and keys that it started with; return it."""
    weights, _ = initial_weights(loaded.cfg, seed)
    first = {key: weights[key] for key in weights if ".query." in key or ".key." in key}
    loaded.model.load_state_dict(first, strict=False)
    return loaded


def likeness(a, b):
    """Correlation of two maps, means over heads, each less uniform attention."""
    below = np.tril_indices(len(a[0]))
    return np.corrcoef([weights.mean(0)[below] - 1 / (below[0] + 1) for weights in (a, b)])[0, 1]


def spread(values):
    """Mean and range."""
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw_map(axes, weights, title):
    """Draw the mean over heads of a (G, T, T) map with its numbers."""
    weights = weights.mean(0)
    axes.imshow(np.ma.masked_invalid(weights), cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(np.isfinite(weights)):
        color = "white" if weights[row, column] > 0.6 else "black"
        style = dict(ha="center", va="center", fontsize=6, color=color)
        axes.text(column, row, f"{weights[row, column]:.2f}", **style)
    axes.set_xticks(range(len(weights)), range(1, len(weights) + 1), fontsize=7)
    axes.set_yticks(range(len(weights)), range(1, len(weights) + 1), fontsize=7)
    axes.set_title(title, fontsize=9)


def draw_seeds(maps, models, file):
    """Draw the maps of the third stage, a column for each seed, and lambda of every layer."""
    figure = Figure(figsize=(2 * len(models), 6.4), layout="constrained")
    grid = figure.add_gridspec(len(maps) + 1, len(models))
    for row, (kind, seeds) in enumerate(maps.items()):
        for seed, stages in enumerate(seeds):
            draw_map(figure.add_subplot(grid[row, seed]), stages[2], f"{KINDS[kind]}, seed {seed}")
    axes = figure.add_subplot(grid[len(maps), :])
    for seed, loaded in enumerate(models):
        weights = loaded.model.state_dict()
        found = {key: weights[key] for key in weights if key.endswith("history_scale")}
        at = np.arange(len(found)) + 0.12 * (seed - len(models) / 2)
        means = [float(scale.mean()) for scale in found.values()]
        deviations = [float(scale.std()) for scale in found.values()]
        axes.errorbar(at, means, deviations, fmt="o", ms=3, lw=1, label=f"seed {seed}")
    blocks = [".".join(name.split(".")[1:3]).removeprefix("layer") for name in found]
    axes.set_xticks(range(len(found)), blocks, fontsize=7)
    title = "λ of MRLA-light by stage and block, 1 at first: mean and deviation over channels"
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, ncols=len(models), loc="lower left")
    figure.savefig(file, dpi=90)


def draw_beside(image, stages, file):
    """Draw an image and, beside it, what the layers of each stage attended to in it."""
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(stages), width_ratios=[1.33] + [1] * len(stages))
    first.imshow(image.picture)
    first.set_axis_off()
    for number, (axes, weights) in enumerate(zip(others, stages, strict=True), 1):
        draw_map(axes, weights, f"stage {number}")
    others[0].set(xlabel="attends to layer", ylabel="layer")
    figure.savefig(file, dpi=110)


def main(argv=None):
    """Draw the pictures and print the figures."""
    args = parse_args(argv)
    dataset = COCO(args.data_root / "annotations/test.json").dataset
    images = [args.data_root / "JPEGImages" / image["file_name"] for image in dataset["images"]]
    models = {kind: [load(kind, seed, args) for seed in range(args.seeds)] for kind in KINDS}
    base = models["mrla_base"][0]
    draw_beside(base.prepare(images[0]), record(base, images[:1]), args.out / "layer_attention.png")

    maps = {kind: [record(loaded, images) for loaded in seeds] for kind, seeds in models.items()}
    draw_seeds(maps, models["mrla_light"], args.out / "inside.png")
    trained = maps["mrla_base"]
    first = []
    for seed, loaded in enumerate(models["mrla_base"]):
        first.append(record(with_initial_queries(loaded, seed), images))
    rows = [{"stage": stage + 1} for stage in range(len(trained[0]))]
    for stage, row in enumerate(rows):
        for name, of in {"two seeds": trained, "two seeds, first queries and keys": first}.items():
            pairs = itertools.combinations(of, 2)
            row[name] = spread([likeness(a[stage], b[stage]) for a, b in pairs])
        own = [likeness(a[stage], b[stage]) for a, b in zip(trained, first, strict=True)]
        row["a seed, last and first queries and keys"] = spread(own)
    light = itertools.chain.from_iterable(maps["mrla_light"])
    gates = np.concatenate([weights.diagonal(0, 1, 2).ravel() for weights in light])
    closed, opened = sum(gates < 0.01), sum(gates > 0.99)
    print(f"{as_markdown(rows)}\n{len(gates)} gates, {closed} below 0.01, {opened} above 0.99")


if __name__ == "__main__":
    sys.exit(cli.run(main))
