"""Writes the generated shapes data set in COCO layout, or keeps the one that is there."""

import argparse
import sys
import time

from mrla_mm.datasets.shapes import generate_shapes
from mrla_mm.errors import InputError


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="data/shapes", help="folder that gets annotations/, train2017/ and val2017/")
    parser.add_argument("--num-train", type=int, default=800, help="images to train on")
    parser.add_argument("--num-val", type=int, default=100, help="images to evaluate on")
    parser.add_argument("--size", type=int, default=160, help="longer side of the images in pixels")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        written = generate_shapes(
            args.out, num_train=args.num_train, num_val=args.num_val, size=args.size, seed=args.seed
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {'written' if written else 'already there, kept'} ({time.perf_counter() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
