#!/usr/bin/env python
"""Draw how much each layer attends to each earlier one of its stage, for an image or the mean over a folder.

  visualize_layer_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--out-dir DIR]

Writes overview.png (each stage, mean over its heads), stage<n>.png (its heads) and scores.csv (every number).
"""

import argparse
import sys

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch

from mrla_mm import cli, outputs, picture_cli
from mrla_mm.analysis import layer_attention_plots as plots
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_layer_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    picture_cli.add_picture_arguments(parser, out_dir="work_dirs/layer_attention")
    parser.add_argument(
        "--max-heads", type=int, default=16, help="heads to draw of a stage, spread evenly (default: 16)"
    )
    args = parser.parse_args(argv)
    if args.max_heads < 1:
        raise InputError(f"--max-heads {args.max_heads}: give a positive number")
    return args


def main(argv=None):
    """Run the model over the images, and draw what its layers attended to."""
    args = parse_args(argv)
    images = picture_cli.chosen_images(args)
    outputs.spare_inputs(images, [args.out_dir / "overview.png", *args.out_dir.glob("stage*.png")])
    outputs.make_folder(args.out_dir)
    (loaded,) = picture_cli.load_models(args)
    with torch.no_grad(), LayerAttentionRecorder(loaded.model) as recorder:
        for number, path in enumerate(images, 1):
            loaded.model.extract_feat(loaded.prepare(path).inputs)
            print(f"[{number}/{len(images)}] {path.name}", flush=True)
    stages = recorder.stages()
    written = [plots.plot_overview(stages, args.out_dir / "overview.png")]
    for number, stage in enumerate(stages, 1):
        written.append(plots.plot_stage(stage, number, args.out_dir / f"stage{number}.png", max_heads=args.max_heads))
    written.append(plots.write_csv(stages, args.out_dir / "scores.csv"))
    print(f"mean over {len(images)} image{'s' if len(images) > 1 else ''}, written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
