#!/usr/bin/env python
"""Cut eight images out of a COCO annotation file, to see whether a detector can overfit them.

`python .dev_scripts/coco_subset.py data/coco/annotations/instances_train2017.json data/coco/annotations/coco8.json`
takes the first images, by id, that are easy enough for the small configs: 1 to 8 objects, none of them narrow, and no
crowd. Categories stay as they are, so class indices do not change.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from mrla_mm import cli

IMAGES, MAX_OBJECTS = 8, 8
MIN_SIDE = 0.08  # of the image's longer side


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="coco_subset.py", description=__doc__.splitlines()[0])
    parser.add_argument("annotations", type=Path)
    parser.add_argument("out", type=Path)
    return parser.parse_args(argv)


def is_easy(image, objects):
    """Whether an image has few objects, all of them large."""
    side = MIN_SIDE * max(image["width"], image["height"])
    return 0 < len(objects) <= MAX_OBJECTS and all(min(o["bbox"][2:]) >= side and not o["iscrowd"] for o in objects)


def main(argv=None):
    """Write the subset."""
    args = parse_args(argv)
    data, by_image = json.loads(args.annotations.read_text(encoding="utf-8")), defaultdict(list)
    for annotation in data["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    images = sorted(data["images"], key=lambda image: image["id"])
    images = [image for image in images if is_easy(image, by_image[image["id"]])][:IMAGES]
    annotations = [annotation for image in images for annotation in by_image[image["id"]]]
    args.out.write_text(json.dumps({**data, "images": images, "annotations": annotations}))
    print(f"{args.out}: {len(images)} images, {len(annotations)} objects")


if __name__ == "__main__":
    sys.exit(cli.run(main))
