#!/usr/bin/env python
"""Draw the attention maps of a vision transformer's heads for a chosen query patch, for one or more models.

  visualize_vit_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--patch ROW COL] [--compare CONFIG2 CHECKPOINT2]...

Writes <image name>.png (a row for each model, a panel for each head) and attention.csv (every weight).
"""

import argparse
import sys

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch

from mrla_mm import cli, outputs, picture_cli
from mrla_mm.analysis import vit_attention
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_vit_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    picture_cli.add_picture_arguments(parser, out_dir="work_dirs/vit_attention")
    picture_cli.add_compare_argument(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--patch", type=int, nargs=2, metavar=("ROW", "COL"), help="query patch, from 0 (default: the middle one)"
    )
    where.add_argument(
        "--pixel",
        type=int,
        nargs=2,
        metavar=("X", "Y"),
        help="query patch by a pixel of the picture the model sees, after its pipeline resized and cropped it",
    )
    parser.add_argument("--layer", type=int, default=-1, help="layer from 1, or from the end if negative (default: -1)")
    parser.add_argument("--max-heads", type=int, default=6, help="heads to draw, spread evenly (default: 6)")
    args = parser.parse_args(argv)
    if args.max_heads < 1:
        raise InputError(f"--max-heads {args.max_heads}: give a positive number")
    return args


def query_point(args, recorder, picture):
    """Return where the query lies in the first model's picture, as fractions of its height and width."""
    height, width = picture.shape[:2]
    if args.pixel:
        x, y = args.pixel
        if not (0 <= x < width and 0 <= y < height):
            raise InputError(f"--pixel {x} {y} lies outside the picture the model sees, {width} x {height} pixels")
        return (y + 0.5) / height, (x + 0.5) / width
    if args.patch:
        recorder.attention_of(tuple(args.patch))  # says if there is no such patch
        row, column = args.patch
    else:
        row, column = (int(side / cell / 2) for side, cell in zip((height, width), recorder.cell, strict=True))
    down, right = ((at + 0.5) * cell for at, cell in zip((row, column), recorder.cell, strict=True))
    return down / height, right / width


def look(loaded, path, args, point):
    """Return what a model does at the query of an image, and the query's place in its picture."""
    prepared = loaded.prepare(path)
    with torch.no_grad(), vit_attention.TokenRecorder(loaded.model, args.layer) as recorder:
        loaded.model.extract_feat(prepared.inputs)
    point = point or query_point(args, recorder, prepared.picture)
    sides = zip(point, prepared.picture.shape, recorder.cell, strict=False)
    patch = tuple(int(fraction * side / cell) for fraction, side, cell in sides)
    maps, extra = recorder.attention_of(patch)
    found = vit_attention.PatchAttention(
        loaded.name, recorder.layer, patch, recorder.cell, maps, extra, prepared.picture
    )
    return found, point


def main(argv=None):
    """Run the models over the images, and draw where the query patch looks."""
    args = parse_args(argv)
    images = picture_cli.chosen_images(args)
    out_files = picture_cli.paths_by_name(images, args.out_dir)
    table = args.out_dir / "attention.csv"
    outputs.spare_inputs(images, [*out_files.values(), table])
    outputs.make_folder(args.out_dir)
    models = picture_cli.load_models(args)
    rows = []
    for number, (path, out_file) in enumerate(out_files.items(), 1):
        point, found = None, []
        for loaded in models:
            one, point = look(loaded, path, args, point)
            found.append(one)
        vit_attention.plot_heads(found, out_file, max_heads=args.max_heads)
        rows += [(path.name, one) for one in found]
        print(f"[{number}/{len(images)}] {out_file}", flush=True)
    print(f"written: {vit_attention.write_csv(rows, table)}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
