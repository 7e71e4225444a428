"""Objects of a COCO file that mmdet would train without, and say nothing."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrla_mm.datasets.masks import is_drawn


def used_annotations(content: Mapping, classes: Sequence[str]) -> Iterator[tuple[int, Mapping]]:
    """Yield the number and entry of each annotation that mmdet would load."""
    reasons = reasons_by_number(content, classes, 0, with_mask=False)
    for number, entry in enumerate(content.get("annotations", ())):
        if number not in reasons:
            yield number, entry


def reasons_by_number(content: Mapping, classes: Sequence[str], min_size: float, *, with_mask: bool) -> dict[int, str]:
    """Return why mmdet leaves out an annotation, by its number in the file; the used ones are not there."""
    images = {image["id"]: image for image in content["images"]}
    names = {category["id"]: category["name"] for category in content["categories"]}
    wanted = set(classes)
    reasons = {}
    for number, entry in enumerate(content.get("annotations", ())):
        image, name = images.get(entry["image_id"]), names.get(entry["category_id"])
        if image is None:
            reasons[number] = "on images that the file does not list"
        elif name is None:
            reasons[number] = "of categories that the file does not list"
        elif name not in wanted:
            reasons[number] = "of categories that metainfo.classes leaves out"
        elif entry.get("ignore"):
            reasons[number] = 'marked "ignore"'
        elif not has_extent(entry, image):
            reasons[number] = "with a box or area of nothing, a side below a pixel, or outside the image"
        elif min(image["width"], image["height"]) < min_size:
            reasons[number] = f"on images with a side below filter_cfg.min_size={min_size}"
        elif with_mask and not is_drawn(entry.get("segmentation")):
            reasons[number] = "with no polygon of three points"
    return reasons


def has_extent(entry: Mapping, image: Mapping) -> bool:
    """Whether mmdet finds a box large enough: a pixel each way, some area, and some of it inside the image."""
    x, y, width, height = entry["bbox"]
    inside = min(x + width, image["width"]) > max(x, 0) and min(y + height, image["height"]) > max(y, 0)
    return inside and entry["area"] > 0 and width >= 1 and height >= 1


def warn_of_losses(
    content: Mapping, classes: Sequence[str], filters: Mapping, ann_file: Path, *, with_mask: bool
) -> None:
    """Warn with counts and the first id of each kind of annotation that will not be trained on."""
    by_reason = defaultdict(list)
    reasons = reasons_by_number(content, classes, filters.get("min_size", 0), with_mask=with_mask)
    for number, reason in reasons.items():
        by_reason[reason].append(content["annotations"][number]["id"])
    if by_reason:
        kinds = "; ".join(f"{len(ids)} {reason} (the first has id {ids[0]!r})" for reason, ids in by_reason.items())
        warnings.warn(
            f"{ann_file}: {len(reasons)} of {len(content['annotations'])} annotations will not be trained on: {kinds}",
            stacklevel=2,
        )
