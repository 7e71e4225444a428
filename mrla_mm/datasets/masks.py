"""Masks of a COCO file: which pycocotools ends on, and which mmdet would leave out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrla_mm.arguments import is_number, shown
from mrla_mm.errors import InputError

FAR = 10  # pycocotools takes memory for every pixel of an outline; this many image sides away it is no outline


def check_masks(
    content: Mapping, entries: Iterator[tuple[int, Mapping]], ann_file: Path, *, whole: bool = False
) -> None:
    """Raise InputError for the first of the (number, annotation) entries whose mask cannot be drawn.

    A polygon of fewer than three points is left out by mmdet; pycocotools alone ends on it, so `whole` refuses it.
    """
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    for number, entry in entries:
        if entry["image_id"] in sizes and (
            fault := fault_of(entry.get("segmentation"), *sizes[entry["image_id"]], whole)
        ):
            raise InputError(
                f"{ann_file}: annotations[{number}] has segmentation={shown(entry.get('segmentation'), 80)}, but the "
                f"pipeline loads masks: {fault}. Give each object its polygons or run lengths, or use a detector of "
                "boxes alone (faster_rcnn_*, retinanet_*)"
            )


def fault_of(mask: object, height: int, width: int, whole: bool) -> str | None:
    """Return why a mask of an image cannot be drawn, or None; polygons of too few points can, but see `is_drawn`."""
    if not mask:
        return "there is none"
    if isinstance(mask, Mapping):
        return fault_of_lengths(mask, height, width)
    if not isinstance(mask, list) or not all(isinstance(part, list) for part in mask):
        return "it is neither a list of polygons, each a list [x1, y1, x2, y2, ...], nor run lengths"
    for part in mask:
        if not all(map(is_number, part)):
            return "a polygon has something other than numbers"
        if any(abs(value) > FAR * max(height, width) for value in part):
            return f"a polygon leaves the image of {width} x {height} pixels by far"
        if whole and not has_points(part):
            return "a polygon has fewer than three points, or half a point"
    return None


def is_drawn(mask: object) -> bool:
    """Whether mmdet trains on a mask without a fault: one of polygons alone needs three points in one of them."""
    return not isinstance(mask, list) or any(map(has_points, mask))


def has_points(polygon: list) -> bool:
    """Whether a polygon [x1, y1, x2, y2, ...] has three points or more, and no half ones."""
    return len(polygon) >= 6 and len(polygon) % 2 == 0


def fault_of_lengths(mask: Mapping, height: int, width: int) -> str | None:
    """Return what is wrong with run lengths, of a list or packed into a string."""
    if mask.get("size") != [height, width]:
        return f"run lengths need size=[{height}, {width}], the image's height and width, not {mask.get('size')!r}"
    lengths = mask.get("counts")
    if isinstance(lengths, str):
        lengths = unpack(lengths)
    whole = isinstance(lengths, list) and all(type(length) is int and length >= 0 for length in lengths)
    if not whole or sum(lengths) != height * width:
        return f"its run lengths are no whole numbers that add up to {height} x {width} pixels"
    return None


def unpack(counts: str) -> Sequence[int] | None:
    """Return the run lengths in a string of pycocotools, None if it is none.

    A length is in groups of five bits from the lowest, each a character from "0" on, with 32 added if one follows; from
    the fourth on it is the difference to the length two before it.
    """
    lengths, value, shift = [], 0, 0
    for character in counts:
        bits = ord(character) - ord("0")
        if not 0 <= bits < 64 or shift > 60:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
        value = shift = 0
    return None if shift else lengths
