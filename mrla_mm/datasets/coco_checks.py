"""The check of annotation files in COCO's format."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mmengine.dataset import BaseDataset

# Report corner format if more than 95 % of the boxes could be corners and more than 25 % leave the
# image as xywh.
COULD_BE_CORNERS = 0.95
BEYOND_IMAGE = 0.25
TOLERATED = 0.1  # share of objects without a usable box: real data have some
MARGIN = 1.05  # times the image's size: objects that fill it may be labelled a bit too large
NUMBERS = r"[-+.\deE\s]*"
# Polygons are most of a file, so those that start with one of use, of at least three points not in
# the first row of pixels, are dropped before parsing. Quotes inside JSON strings are escaped, so
# the pattern cannot match there.
POLYGONS = re.compile(
    rf'"segmentation":\s*\[\s*\[\s*[1-9][\d.]*(?:,{NUMBERS},{NUMBERS}){{2,}},{NUMBERS}\]'
    r"[-+.\deE,\s\[\]]*\]"
)
NUMBER = "a number"
TEXT = "a text"
ID = "a number or a text"
BOX = "[x, y, width, height]"
TYPES = {NUMBER: {int, float, bool}, TEXT: {str}, ID: {int, float, str}, BOX: {list}}
OPTIONAL = dict(iscrowd=NUMBER, ignore=NUMBER)
FIELDS = {
    "images": dict(id=ID, file_name=TEXT, width=NUMBER, height=NUMBER),
    "annotations": dict(id=NUMBER, image_id=ID, category_id=ID, bbox=BOX, area=NUMBER) | OPTIONAL,
    "categories": dict(id=ID, name=TEXT),
}


class Findings(NamedTuple):
    """What the check of a file has found."""

    faults: list[str]
    objects: int | None = None  # that are learned; None where that is not known


def inspect_coco(dataset: BaseDataset, masks: Mapping | None, *, scored: bool) -> Findings:
    """Check a file in COCO's format: `masks` is the step that loads them, `scored` to evaluate."""
    with open(dataset.ann_file) as file:  # as text, as mmdet does
        content = json.loads(POLYGONS.sub('"segmentation": true', file.read()))
    if faults := check_fields(content):
        return Findings(faults)
    classes = dataset.metainfo["classes"]
    annotations = content.get("annotations", [])
    names = {category["id"]: category["name"] for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    faults = check_names(list(names.values()), classes)
    if repeated := find_repeated(each["id"] for each in content["images"]):
        told = f"two images have the id {repeated[0]!r}, and mmdet gives one the boxes of both"
        faults.append(f"{told}: give each image its own id")
    if repeated := find_repeated(each["id"] for each in annotations):
        faults.append(f"two annotations have the id {repeated[0]!r}: give each its own")
    faults += check_references(annotations, names, images)
    wanted = {number for number, name in names.items() if name in classes}
    learnable = [each for each in annotations if each["category_id"] in wanted]
    if scored and any("iscrowd" not in each for each in learnable):
        faults.append("annotations without iscrowd, which the evaluation needs: add iscrowd=0")
    if scored and any(each["id"] == 0 for each in learnable):
        faults.append("COCO's evaluation counts the annotation with id=0 as missed: start at 1")
    boxes = Boxes(annotations, images, wanted)
    faults += boxes.faults()
    if masks:
        kept = np.flatnonzero(boxes.is_kept)
        faults += check_masks([boxes.annotations[index] for index in kept], masks)
    min_size = (dataset.filter_cfg or {}).get("min_size", 0)
    is_large = boxes.image_size.min(1) >= min_size
    is_learned = boxes.is_kept & is_large & ~boxes.is_crowd
    return Findings(faults, None if faults else int(is_learned.sum()))


def check_fields(content: Mapping[str, list[dict]]) -> list[str]:
    """Return a fault for each field that records lack or have of another type, with the first."""
    faults = []
    for kind, fields in FIELDS.items():
        for key, expected in fields.items():
            default = 0 if key in OPTIONAL else None
            for index, record in enumerate(content.get(kind, [])):
                if type(record.get(key, default)) not in TYPES[expected]:
                    told = f"{key}={record[key]!r}" if key in record else f"no {key!r}"
                    faults.append(f"{kind}[{index}] has {told}: write {expected} in all of them")
                    break
    if faults:
        return faults
    wrong = [each for each in content.get("annotations", []) if len(each["bbox"]) != 4]
    if wrong:
        told = f"annotation {wrong[0]['id']} has bbox={wrong[0]['bbox']}"
        faults.append(f"{told}: write {BOX} in all of them")
    return faults


def check_masks(annotations: Sequence[dict], step: Mapping) -> list[str]:
    """Return a fault if annotations have no mask, or many one that mmdet's loading step ignores."""
    if any(not each.get("segmentation") for each in annotations):
        return ["boxes without segmentation: add masks, or take a detector that needs none"]
    unused = [each for each in annotations if not is_used(each["segmentation"], step)]
    ignored = [each for each in unused if not each.get("iscrowd")]
    if len(ignored) <= TOLERATED * len(annotations):
        return []
    told = f"mmdet ignores {len(ignored)} of {len(annotations)} boxes for their segmentation"
    first = f"the first is that of annotation {ignored[0]['id']}"
    return [f"{told}, {first}: write [[x1, y1, x2, y2, x3, y3, ...]] in pixels"]


def is_used(mask: bool | dict | list, step: Mapping) -> bool:
    """Whether mmdet uses a mask: polygons, of pixels, of three points or more, or run lengths."""
    if isinstance(mask, dict):
        return step.get("poly2mask", True) and {"counts", "size"} <= mask.keys()
    if mask is True:  # dropped while reading
        return True
    return any(len(each) % 2 == 0 and len(each) >= 6 and max(each) > 1 for each in mask)


def find_repeated(values: Iterable) -> list:
    """Return the values that come more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def check_names(names: list[str], classes: Sequence[str]) -> list[str]:
    """Return a fault if the file's names that are learned are not the classes in their order."""
    learned = [name for name in names if name in classes]
    if repeated := find_repeated(learned):
        remedy = "give each name once, and annotations its id"
        return [f"two categories have the name {repeated[0]!r}: {remedy}"]
    if set(learned) != set(classes):
        return [missing_names(classes, names)]
    if learned != list(classes):
        return [f"mmdet numbers classes in the file's order: set metainfo.classes={learned}"]
    return []


def check_references(annotations: Sequence[dict], names: Mapping, images: Mapping) -> list[str]:
    """Return faults of the ids and flags that annotations have."""
    faults = []
    unknown = [each["category_id"] for each in annotations if each["category_id"] not in names]
    if len(unknown) > TOLERATED * len(annotations):
        known = f"the categories have the ids {', '.join(map(repr, names))}"
        told = f"annotations have the category_id {unknown[0]!r}, but {known[:200]}"
        faults.append(f"{told}: use the same ids in both")
    stray = [each["image_id"] for each in annotations if each["image_id"] not in images]
    if len(stray) > TOLERATED * len(annotations):
        told = f"{len(stray)} of {len(annotations)} annotations have an image_id of no image"
        known = f"images have ids such as {next(iter(images), None)!r}"
        faults.append(f"{told}, the first is {stray[0]!r}, but {known}: use the same ids in both")
    return faults


class Boxes:
    """The boxes of the annotations that mmdet reads, one entry a box; sizes are along x and y."""

    def __init__(self, annotations: Sequence[dict], images: Mapping[int, dict], wanted: set[int]):
        self.annotations = []
        rows = []
        for each in annotations:
            image = images.get(each["image_id"])
            if image and not each.get("ignore"):
                self.annotations.append(each)
                x, y, w, h = [0.0 + side for side in each["bbox"]]  # a text is an error
                rows.append((x, y, w, h, image["width"], image["height"]))
        self.corner, self.size, self.image_size = np.split(np.reshape(rows, (-1, 6)), 3, axis=1)
        self.area = np.array([each["area"] for each in self.annotations], float)
        is_wanted = [each["category_id"] in wanted for each in self.annotations]
        self.is_wanted = np.array(is_wanted, bool)
        self.is_crowd = np.array([bool(each.get("iscrowd")) for each in self.annotations], bool)
        is_inside = (self.corner < self.image_size) & (self.corner + self.size > 0)
        is_read = (is_inside & (self.size >= 1)).all(1) & (self.area > 0)
        self.is_kept = self.is_wanted & is_read

    def faults(self) -> list[str]:
        """Return what is wrong with the numbers."""
        end = self.corner + self.size
        finite = np.isfinite(end.sum(1) + self.area)
        if not finite.all():
            first = self.annotations[int(finite.argmin())]
            return [f"bbox={first['bbox']} of image {first['image_id']!r} is not finite: repair it"]
        limit = MARGIN * self.image_size
        beyond = (end > limit).any(1)
        corners = ((self.corner < self.size) & (self.size <= limit)).all(1)
        if corners.sum() > COULD_BE_CORNERS * len(corners) and beyond.mean() > BEYOND_IMAGE:
            return ["bbox seems to be [x1, y1, x2, y2]: write [x, y, width, height]"]
        skipped = self.is_wanted & ~self.is_kept
        if skipped.sum() > TOLERATED * self.is_wanted.sum():
            first = self.annotations[int(skipped.argmax())]
            width, height = self.image_size[skipped.argmax()].astype(int)
            told = f"{skipped.sum()} of {self.is_wanted.sum()} boxes are outside or below a pixel"
            box = f"the first is {first['bbox']} with area={first['area']}"
            where = f"of image {first['image_id']!r} with width={width} and height={height}"
            return [f"{told}, {box} {where}: mmdet skips them, repair boxes or sizes"]
        return []


def missing_names(classes: Sequence[str], names: Sequence[str]) -> str:
    """Return the fault that some classes are not among the names of a file."""
    missing = [name for name in classes if name not in names]
    told = f"{missing[0]!r} ({len(missing)} of {len(classes)} classes are missing)"
    remedy = "add them to the file, or set metainfo.classes of every data set, and num_classes"
    return f"has no {told}, but {', '.join(map(repr, names[:8]))}: {remedy}"
