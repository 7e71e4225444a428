#!/usr/bin/env python
"""Draw how much each layer attends to each earlier one of its stage.

  visualize_layer_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--out-dir DIR]

Writes overview.png (each stage, mean over its heads), stage<n>.png (its heads) and scores.csv
(every number), for an image or the mean over a folder.
"""

import sys

import torch

from mrla_mm import cli, inference
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder


def parse_args(argv):
    """Parse the command line."""
    parser = inference.picture_parser("visualize_layer_attention", __doc__, compare=False)
    parser.add_argument("--max-heads", type=int, default=16, help="heads to draw (default: 16)")
    return parser.parse_args(argv)


def main(argv=None):
    """Run the model over the images, and draw what its layers attended to."""
    args = parse_args(argv)
    from mrla_mm.analysis import layer_attention_plots as plots

    images = inference.chosen_images(args)
    (loaded,) = inference.load_models(args)
    with torch.no_grad(), LayerAttentionRecorder(loaded.model) as recorder:
        for path in images:
            loaded.model.extract_feat(loaded.prepare(path).inputs)
            print(path.name, flush=True)
    stages = recorder.stages()
    plots.plot_overview(stages, args.out_dir / "overview.png")
    for number, stage in enumerate(stages, 1):
        plots.plot_stage(stage, number, args.out_dir / f"stage{number}.png", args.max_heads)
    plots.write_csv(stages, args.out_dir / "scores.csv")
    print(f"mean over {len(images)} image(s), written: {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
