#!/usr/bin/env python
"""Draw where a patch looks in each head of the last layer of a vision transformer, for one or more models.

  visualize_vit_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--patch ROW COL] [--compare CONFIG2 CHECKPOINT2]...

Writes <image name>.png: a row for each model, a panel for each head. A red box marks the query patch.
"""

import argparse
import sys

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from matplotlib.figure import Figure

from mrla_mm import cli, inference
from mrla_mm.analysis.vit_attention import last_layer_attention
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_vit_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inference.add_picture_arguments(parser, out_dir="work_dirs/vit_attention")
    inference.add_compare_argument(parser)
    parser.add_argument(
        "--patch", type=int, nargs=2, metavar=("ROW", "COL"), help="query patch, from 0 (default: the middle one)"
    )
    return parser.parse_args(argv)


def draw(panels, found, name, patch):
    """Draw what a model sees, and the attention of a patch in each head over it."""
    picture, weights, (height, width) = found
    row, column = patch or (height // 2, width // 2)
    if row not in range(height) or column not in range(width):
        raise InputError(f"--patch {row} {column} lies outside the {height} x {width} grid of patches")
    extra = weights.shape[-1] - height * width
    maps = weights[0, :, extra + row * width + column, extra:].unflatten(-1, (height, width)).cpu()
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    for number, axes in enumerate(panels[: len(maps) + 1]):
        axes.imshow(picture, extent=extent)
        axes.set_title(f"head {number}, max {maps[number - 1].max():.3f}" if number else name, fontsize=7)
        axes.plot(column, row, "s", color="red", fillstyle="none")
        if number:
            axes.imshow(maps[number - 1], cmap="turbo", alpha=0.55, vmin=0, interpolation="bilinear")


def main(argv=None):
    """Run the models over the images, and draw where the query patch looks."""
    args = parse_args(argv)
    images = inference.chosen_images(args)
    models = inference.load_models(args)
    for path, out_file in inference.paths_by_name(images, args.out_dir).items():
        prepared = [loaded.prepare(path) for loaded in models]
        found = [last_layer_attention(m.model.backbone, p.inputs) for m, p in zip(models, prepared, strict=True)]
        columns = 1 + max(weights.shape[1] for weights, _ in found)
        figure = Figure(figsize=(2.2 * columns, 2.5 * len(models)), layout="compressed")
        grid = figure.subplots(len(models), columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (loaded, ready, (weights, shape)) in enumerate(zip(models, prepared, found, strict=True)):
            draw(grid[row], (ready.picture, weights, shape), loaded.name, args.patch)
        figure.savefig(out_file, dpi=130)
        print(out_file, flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
