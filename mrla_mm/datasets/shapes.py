"""The generated quick-start data set: shapes in exact COCO layout, for detection and instance segmentation."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

from mrla_mm.datasets.drawing import CLASSES, Instance, draw_scene, extent
from mrla_mm.errors import InputError

FORMAT_VERSION = 1  # raise it when the same parameters give other pixels or annotations
MANIFEST = "shapes.json"
SPLITS = {"train2017": 0, "val2017": 500_000}  # first image id of each split, less one


def generate_shapes(
    root: str | Path, *, num_train: int = 800, num_val: int = 100, size: int = 160, seed: int = 0
) -> bool:
    """Write the data set under `root` unless one of the same parameters is there; return whether it was written.

    The same parameters give the same bytes. The set is built beside `root` and renamed into place.

    Args:
        root: folder that gets `annotations/`, `train2017/` and `val2017/`.
        num_train: images of the train split.
        num_val: images of the val split.
        size: longer side of the images in pixels, at least 64.
        seed: source of all randomness.

    Raises:
        InputError: `root` holds something that this function did not write.
    """
    root = Path(root).absolute()
    manifest = json.dumps(dict(format=FORMAT_VERSION, num_train=num_train, num_val=num_val, size=size, seed=seed))
    if (root / MANIFEST).is_file():
        if (root / MANIFEST).read_text() == manifest:
            return False
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise InputError(f"{root} exists and is not a generated data set: choose another folder, or remove it")
    staging = root.with_name(f".{root.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    for (split, first_id), count in zip(SPLITS.items(), (num_train, num_val), strict=True):
        write_split(staging, split, first_id=first_id, count=count, size=size, seed=seed)
    (staging / MANIFEST).write_text(manifest)
    shutil.rmtree(root, ignore_errors=True)
    staging.rename(root)
    return True


def segmentation_of(mask: np.ndarray) -> list[list[float]] | dict:
    """Return a COCO segmentation that pycocotools decodes to exactly this mask (H, W) with at least one pixel.

    Polygons where possible, run lengths for masks with holes. Contours are traced at twice the resolution: they run a
    quarter pixel inside the mask's edge, between the pixel centres that decide membership.
    """
    doubled = mask.astype(np.uint8).repeat(2, 0).repeat(2, 1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    for tolerance in (1.5, 1.0, 0.0) if (hierarchy[0, :, 3] < 0).all() else ():  # in half pixels, fewest points first
        polygons = [((cv2.approxPolyDP(c, tolerance, True).reshape(-1) + 0.5) / 2).tolist() for c in contours]
        if all(len(polygon) >= 6 for polygon in polygons):
            decoded = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, *mask.shape)))
            if np.array_equal(decoded, mask):
                return polygons
    return run_lengths(mask)


def run_lengths(mask: np.ndarray) -> dict:
    """Return COCO's uncompressed run lengths: of zeros and ones in turn, columns first, zeros to begin with."""
    flat = np.concatenate([[0], mask.ravel(order="F").astype(np.int8), [2]])
    ends = np.flatnonzero(np.diff(flat))
    return {"size": list(mask.shape), "counts": np.diff(np.concatenate([[0], ends])).tolist()}


def write_split(root: Path, split: str, *, first_id: int, count: int, size: int, seed: int) -> None:
    """Write images and annotation file of a split; a longer one begins with the same images."""
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for index in range(count):
        rng = np.random.default_rng([seed, first_id, index])
        sides = size, int(size * rng.uniform(0.75, 1))
        width, height = sides if rng.random() < 0.5 else sides[::-1]
        empty = index % 25 == 24
        picture, instances = draw_scene(height, width, rng=rng, crowd=index % 8 == 4 and not empty, empty=empty)
        image_id = first_id + index + 1
        name = f"{image_id:012d}.jpg"
        cv2.imwrite(str(root / split / name), picture, [cv2.IMWRITE_JPEG_QUALITY, 92])
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        annotations += [annotation(each, image_id, number) for number, each in enumerate(instances, 1)]
    content = {
        "info": {"description": "mrla_mm generated shapes", "version": str(FORMAT_VERSION)},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES, 1)],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content, separators=(",", ":")))


def annotation(instance: Instance, image_id: int, number: int) -> dict:
    """Return the COCO annotation of an instance."""
    rows, columns = extent(instance.visible)
    return {
        "id": image_id * 100 + number,
        "image_id": image_id,
        "category_id": instance.label + 1,
        "bbox": [columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start],
        "area": int(np.count_nonzero(instance.visible)),
        "iscrowd": int(instance.crowd),
        "segmentation": run_lengths(instance.visible) if instance.crowd else segmentation_of(instance.visible),
    }
