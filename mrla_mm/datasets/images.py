"""Image files of built data sets: which are missing before a run, and which cannot be read during one."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import cv2
from mmengine.dataset import BaseDataset

from mrla_mm.datasets.config_parts import shorten
from mrla_mm.errors import InputError

# The last bytes of a whole file; decoders fill what is cut off with grey or noise and say nothing.
END_MARKERS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND", b"GI": b"\x00;"}
RESIZES = ("Resize", "RandomResize", "RandomChoiceResize", "FixScaleResize")
TAIL = 4096  # where the end marker is looked for first: some writers append a few bytes behind it


def leaves(dataset: object) -> Iterator[object]:
    """Yield the built data sets inside wrappers that repeat, mix or concatenate them."""
    if hasattr(dataset, "datasets"):
        for part in dataset.datasets:
            yield from leaves(part)
    elif hasattr(dataset, "dataset"):
        yield from leaves(dataset.dataset)
    else:
        yield dataset


def missing_images(paths: Iterable[str]) -> list[str]:
    """Return those of local image files that do not exist; one scan for each folder."""
    names = defaultdict(list)
    for path in paths:
        folder, name = os.path.split(path)
        names[folder].append(name)
    missing = []
    for folder, listed in names.items():
        present = {entry.name for entry in os.scandir(folder or ".")} if os.path.isdir(folder or ".") else set()
        missing += [os.path.join(folder, name) for name in listed if name not in present]
    return missing


def check_listed_images(names: Sequence[str], folder: str | os.PathLike, phase: str, ann_file: object) -> None:
    """Raise InputError naming the first image files that an annotation file lists and that are not in their folder."""
    refuse_missing(missing_images(os.path.join(folder, name) for name in names), len(names), phase, ann_file)


def check_images_exist(dataset: object, phase: str) -> None:
    """Raise InputError naming the first missing image files of a built data set and their count.

    A data set without an annotation file found its images by looking, so they exist.
    """
    for leaf in leaves(dataset):
        if not isinstance(leaf, BaseDataset) or not leaf.ann_file:
            continue
        paths = (leaf.get_data_info(index).get("img_path") for index in range(len(leaf)))
        local = (path for path in paths if isinstance(path, str) and "://" not in path)
        refuse_missing(missing_images(local), len(leaf), phase, leaf.ann_file)


def refuse_missing(missing: Sequence[str], total: int, phase: str, ann_file: object) -> None:
    """Raise InputError if any of the images of an annotation file is missing."""
    if missing:
        raise InputError(
            f"{phase} data: {len(missing)} of {total} images listed in {ann_file} do not exist, "
            f"first {', '.join(missing[:3])}; complete the image folder, correct data_prefix.img, or "
            "drop them from the annotation file"
        )


def check_objects(dataset: object, phase: str) -> None:
    """Raise InputError if a built detection training set has no object at all, which mmdet would train on."""
    for leaf in (each for each in leaves(dataset) if isinstance(each, BaseDataset)):
        infos = (leaf.get_data_info(index) for index in range(len(leaf)))
        if len(leaf) and "instances" in leaf.get_data_info(0) and not any(info["instances"] for info in infos):
            raise InputError(
                f"{phase} data: none of the {len(leaf)} images of {leaf.ann_file} has an object of the classes "
                f"{shorten(leaf.metainfo.get('classes', ()))}; class names must equal the file's categories, and boxes "
                "be [x, y, width, height] in pixels, inside the image and of some area"
            )


def fault_of(path: str) -> str | None:
    """Return what is wrong with an image file as far as its ends tell, or None; remote files are not looked at."""
    if "://" in path:
        return None
    if not os.path.isfile(path):
        return "it does not exist"
    with open(path, "rb") as file:
        start = file.read(2)
        file.seek(max(0, os.path.getsize(path) - TAIL))
        tail = file.read()
    if not start:
        return "the file is empty"
    whole = END_MARKERS.get(start, b"") in tail or has_end_marker(path)
    return None if whole and os.path.getsize(path) >= promised_size(path) else "the file is cut off"


def promised_size(path: str) -> int:
    """Return how many bytes a BMP or a WebP file says that it has, 0 for other formats."""
    with open(path, "rb") as file:
        head = file.read(12)
    if head[:2] == b"BM":
        return int.from_bytes(head[2:6], "little")
    return int.from_bytes(head[4:8], "little") + 8 if head[:4] == b"RIFF" and head[8:] == b"WEBP" else 0


def has_end_marker(path: str) -> bool:
    """Whether an image's end marker is anywhere in the file: phones append whole videos behind it.

    In a JPEG only what follows the start of its first scan counts, since the thumbnail before it has one of its own.
    """
    with open(path, "rb") as file:
        data = file.read()
    at = 2
    while data[:2] == b"\xff\xd8" and data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")  # a segment's length counts its own two bytes
    return data.find(END_MARKERS[data[:2]], at) >= 0


def unreadable(path: str, reason: str) -> str:
    """Return the message for an image that cannot be used."""
    return f"image {path} cannot be read ({reason}); replace it, or drop it from the annotation file"


def other_size(path: str, found: Sequence[int], listed: Sequence[int]) -> str:
    """Return the message for an image whose (height, width) are not those of its annotations."""
    turned = tuple(found[:2]) == tuple(reversed(listed))
    remedy = (
        "it is turned by its EXIF orientation. If the boxes are of the pixels as stored, which COCO's tools see, "
        'set color_type="color_ignore_orientation" in LoadImageFromFile; else correct width and height'
        if turned
        else "correct width and height, or the image"
    )
    return (
        f"image {path} has {found[1]} x {found[0]} pixels, but the annotation file says {listed[1]} x {listed[0]}, so "
        f"its boxes would not fit: {remedy}"
    )


class NamedResizeErrors:
    """Wraps a resizing transform of a pipeline so that an image it cannot resize ends the run with the file's name."""

    def __init__(self, resize) -> None:
        self.resize = resize

    def __call__(self, results: dict) -> dict | None:
        """Resize the image of `results`.

        Raises:
            InputError: it is so narrow that nothing would be left of one side.
        """
        try:
            return self.resize(results)
        except cv2.error as error:
            height, width = results["img_shape"][:2]
            raise InputError(
                f"image {results.get('img_path')} of {width} x {height} pixels is too narrow for "
                f"{type(self.resize).__name__}, which would leave a side of no pixel; drop it from the annotation file"
            ) from error

    def __repr__(self) -> str:
        return repr(self.resize)


class NamedImageErrors:
    """Wraps a loading transform of a pipeline so that an image it cannot read ends the run with the file's name."""

    def __init__(self, load) -> None:
        self.load = load

    def __call__(self, results: dict) -> dict | None:
        """Load the image of `results`.

        Raises:
            InputError: it is missing, no image, cut off, which decoders may fill up without a word, or of another size
                than the annotation file says, so that boxes would not fit.
        """
        path, listed = results["img_path"], (results.get("height"), results.get("width"))
        try:
            loaded = self.load(results)
        except Exception as error:
            raise InputError(unreadable(path, fault_of(path) or str(error))) from error
        if fault := fault_of(path):
            raise InputError(unreadable(path, fault))
        if loaded is not None and None not in listed and tuple(loaded["img_shape"][:2]) != listed:
            raise InputError(other_size(path, loaded["img_shape"], listed))
        return loaded

    def __repr__(self) -> str:
        return repr(self.load)


def name_image_errors(dataset: object) -> None:
    """Wrap the image loading and resizing transforms of a built data set's pipelines, once."""
    for leaf in leaves(dataset):
        transforms = getattr(getattr(leaf, "pipeline", None), "transforms", [])
        for index, transform in enumerate(transforms):
            if type(transform).__name__ == "LoadImageFromFile" and not getattr(transform, "ignore_empty", False):
                transforms[index] = NamedImageErrors(transform)
            elif type(transform).__name__ in RESIZES:
                transforms[index] = NamedResizeErrors(transform)
