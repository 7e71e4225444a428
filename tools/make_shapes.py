#!/usr/bin/env python
"""Write the generated shapes data set in COCO layout: `python tools/make_shapes.py --out data/shapes`."""

import argparse
import sys
import time

from mrla_mm import cli
from mrla_mm.datasets.shapes import generate_shapes


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="make_shapes.py",
        description="Write the generated shapes data set in COCO layout, or keep the one that is there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", default="data/shapes", help="folder that gets annotations/, train2017/ and val2017/")
    parser.add_argument("--num-train", type=int, default=800, help="images to train on")
    parser.add_argument("--num-val", type=int, default=100, help="images to evaluate on")
    parser.add_argument("--size", type=int, default=160, help="longer side of the images in pixels")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    return parser.parse_args(argv)


def main(argv=None):
    """Write the set with the given command line."""
    args = parse_args(argv)
    start = time.perf_counter()
    written = generate_shapes(args.out, num_train=args.num_train, num_val=args.num_val, size=args.size, seed=args.seed)
    print(f"{args.out}: {'written' if written else 'already there, kept'} ({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    sys.exit(cli.run(main))
