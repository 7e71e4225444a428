#!/usr/bin/env python
"""Draw how similar the queries of consecutive layers are, for one or more models.

  visualize_query_similarity.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--compare CONFIG2 CHECKPOINT2]...

Writes histograms.png (a row for each model, a panel for each stage) and similarities.csv (every
layer and head).
"""

import sys

import torch

from mrla_mm import cli, inference


def parse_args(argv):
    """Parse the command line."""
    parser = inference.picture_parser("visualize_query_similarity", __doc__, compare=True)
    said = "leave out pairs with a stage's first layer, as the paper does"
    parser.add_argument("--skip-first", action="store_true", help=said)
    return parser.parse_args(argv)


def main(argv=None):
    """Run the models over the images, and draw the similarities of their queries."""
    args = parse_args(argv)
    from mrla_mm.analysis import query_similarity

    images = inference.chosen_images(args)
    found = []
    for loaded in inference.load_models(args):
        with torch.no_grad(), query_similarity.QueryRecorder(loaded.model) as recorder:
            for path in images:
                loaded.model.extract_feat(loaded.prepare(path).inputs)
                print(loaded.name, path.name, flush=True)
        found.append((loaded.name, recorder.stages(skip_first=args.skip_first)))
    query_similarity.plot_histograms(found, args.out_dir / "histograms.png")
    query_similarity.write_csv(found, args.out_dir / "similarities.csv")
    print(f"{len(images)} image(s), written: {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
