#!/usr/bin/env python
"""Cut a few images out of a COCO-format annotation file, to see whether a detector can learn them by heart.

`python tools/coco_subset.py data/coco/annotations/instances_train2017.json data/coco8.json --num 8` takes the first
images, by id, that have annotations; categories stay as they are, so class numbers do not change.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="coco_subset.py", description=__doc__.splitlines()[0])
    parser.add_argument("annotations", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=8, help="number of images")
    parser.add_argument("--max-objects", type=int, help="leave out images with more objects")
    parser.add_argument(
        "--min-side",
        type=float,
        default=0,
        help="leave out images with a narrower box, as a share of the image's longer side",
    )
    parser.add_argument("--no-crowd", action="store_true", help="leave out images with crowd regions")
    return parser.parse_args(argv)


def wanted(image, objects, args):
    """Tell whether an image with these objects qualifies."""
    if not objects or (args.max_objects is not None and len(objects) > args.max_objects):
        return False
    if args.no_crowd and any(o.get("iscrowd") for o in objects):
        return False
    return all(min(o["bbox"][2:]) >= args.min_side * max(image["width"], image["height"]) for o in objects)


def subset(data, args):
    """Return the COCO dictionary cut down to the first qualifying images."""
    by_image = defaultdict(list)
    for annotation in data["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    images = [i for i in sorted(data["images"], key=lambda i: i["id"]) if wanted(i, by_image[i["id"]], args)]
    if len(images) < args.num:
        raise InputError(f"--num {args.num}: only {len(images)} images of {args.annotations} qualify; ask for fewer")
    images = images[: args.num]
    annotations = [annotation for image in images for annotation in by_image[image["id"]]]
    return {**data, "images": images, "annotations": annotations}


def main(argv=None):
    """Write the subset and say what is in it."""
    args = parse_args(argv)
    try:
        small = subset(json.loads(args.annotations.read_text(encoding="utf-8")), args)
    except (InputError, OSError, json.JSONDecodeError, KeyError) as error:
        print(
            f"error: {args.annotations}: {error}" if not isinstance(error, InputError) else f"error: {error}",
            file=sys.stderr,
        )
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(small))
    print(f"{args.out}: {len(small['images'])} images, {len(small['annotations'])} objects")
    return 0


if __name__ == "__main__":
    sys.exit(main())
