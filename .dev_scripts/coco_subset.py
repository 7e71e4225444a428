#!/usr/bin/env python
"""Cut a few images out of a COCO annotation file, to see whether a detector can overfit them.

`python .dev_scripts/coco_subset.py data/coco/annotations/instances_train2017.json data/coco8.json --num 8` takes the
first images, by id, that have annotations. Categories stay as they are, so class indices do not change.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="coco_subset.py", description=__doc__.splitlines()[0])
    parser.add_argument("annotations", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=8, help="number of images")
    parser.add_argument("--max-objects", type=int, help="leave out images with more objects")
    side_help = "leave out images with a narrower box, as a share of the image's longer side"
    parser.add_argument("--min-side", type=float, default=0, help=side_help)
    parser.add_argument("--no-crowd", action="store_true", help="leave out images with crowd regions")
    return parser.parse_args(argv)


def qualifies(image, objects, args):
    """Whether an image with these objects is wanted."""
    if not objects or (args.max_objects is not None and len(objects) > args.max_objects):
        return False
    if args.no_crowd and any(o.get("iscrowd") for o in objects):
        return False
    return all(min(o["bbox"][2:]) >= args.min_side * max(image["width"], image["height"]) for o in objects)


def main(argv=None):
    """Write the subset.

    Raises:
        InputError: too few images qualify.
    """
    args = parse_args(argv)
    data, by_image = json.loads(args.annotations.read_text(encoding="utf-8")), defaultdict(list)
    for annotation in data["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    images = sorted(data["images"], key=lambda image: image["id"])
    images = [image for image in images if qualifies(image, by_image[image["id"]], args)]
    if len(images) < args.num:
        raise InputError(f"--num {args.num}: only {len(images)} images of {args.annotations} qualify")
    images = images[: args.num]
    annotations = [annotation for image in images for annotation in by_image[image["id"]]]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**data, "images": images, "annotations": annotations}))
    print(f"{args.out}: {len(images)} images, {len(annotations)} objects")


if __name__ == "__main__":
    sys.exit(cli.run(main))
