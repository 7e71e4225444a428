#!/usr/bin/env python
"""Draw how much each layer attends to each earlier one of its stage, for an image or the mean over a folder.

  visualize_layer_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--out-dir DIR]

Writes overview.png (each stage, mean over its heads), stage<n>.png (its heads) and scores.csv
(every number).
"""

import argparse
import sys

import torch

from mrla_mm import cli, inference
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_layer_attention.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inference.add_picture_arguments(parser, out_dir="work_dirs/layer_attention")
    parser.add_argument(
        "--max-heads", type=int, default=16, help="heads to draw of each stage (default: 16)"
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Run the model over the images, and draw what its layers attended to."""
    args = parse_args(argv)
    from mrla_mm.analysis import layer_attention_plots as plots

    images = inference.chosen_images(args)
    (loaded,) = inference.load_models(args)
    with torch.no_grad(), LayerAttentionRecorder(loaded.model) as recorder:
        for number, path in enumerate(images, 1):
            loaded.model.extract_feat(loaded.prepare(path).inputs)
            print(f"[{number}/{len(images)}] {path.name}", flush=True)
    stages = recorder.stages()
    plots.plot_overview(stages, args.out_dir / "overview.png")
    for number, stage in enumerate(stages, 1):
        plots.plot_stage(
            stage, number, args.out_dir / f"stage{number}.png", max_heads=args.max_heads
        )
    plots.write_csv(stages, args.out_dir / "scores.csv")
    print(f"mean over {len(images)} image(s), written: {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
