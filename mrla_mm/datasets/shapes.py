"""The generated quick-start data set: shapes in exact COCO layout, for detection and instance segmentation."""

import hashlib
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

from mrla_mm.datasets.drawing import CLASSES, Instance, draw_scene, extent
from mrla_mm.errors import InputError

FORMAT_VERSION = 1  # part of the fingerprint: raise it when the same parameters give other pixels or annotations
MANIFEST = "shapes.json"
_SPLITS = {"train2017": 0, "val2017": 500_000}  # first image id of each split, less one
_CROWD_EVERY, _EMPTY_EVERY = 8, 25


def generate_shapes(root: str | Path, *, num_train: int = 800, num_val: int = 100, size: int = 160, seed: int = 0):
    """Write the data set under `root`, or keep what is there when it is whole and has the same parameters.

    The set is a function of its parameters: the same ones give the same bytes. It is built beside `root` and renamed
    into place, and carries the digest of all its files, so that a killed run or a damaged file leads to a rebuild.

    Args:
        root: Folder that gets `annotations/`, `train2017/` and `val2017/`.
        num_train: Images of the train split.
        num_val: Images of the val split.
        size: Longer side of the images in pixels.
        seed: Source of all randomness.

    Returns:
        bool: True when the set was written, False when the one in place was kept.

    Raises:
        InputError: A parameter is out of range, or `root` holds something that this function did not write.
    """
    _check_parameters(num_train=num_train, num_val=num_val, size=size, seed=seed)
    root = Path(root).absolute()
    fingerprint = {
        "format": FORMAT_VERSION,
        "num_train": num_train,
        "num_val": num_val,
        "size": size,
        "seed": seed,
    }
    if root.exists():
        if is_intact(root, fingerprint):
            return False
        if not root.is_dir() or (any(root.iterdir()) and not (root / MANIFEST).is_file()):
            raise InputError(f"{root} exists and is not a generated data set: choose another folder, or remove it")
    staging, old = (root.with_name(f".{root.name}.{state}") for state in ("partial", "old"))
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)
    for (split, first_id), count in zip(_SPLITS.items(), (num_train, num_val), strict=True):
        _write_split(staging, split, first_id=first_id, count=count, size=size, seed=seed)
    (staging / MANIFEST).write_text(json.dumps({"fingerprint": fingerprint, "digest": _digest(staging)}, indent=1))
    if root.exists():
        root.rename(old)
    staging.rename(root)
    shutil.rmtree(old, ignore_errors=True)
    return True


def is_intact(root: str | Path, fingerprint: dict) -> bool:
    """Whether `root` holds a set of this fingerprint with every file as it was written."""
    try:
        manifest = json.loads((Path(root) / MANIFEST).read_text())
        return manifest["fingerprint"] == fingerprint and manifest["digest"] == _digest(Path(root))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def segmentation_of(mask: np.ndarray) -> list[list[float]] | dict:
    """COCO segmentation that pycocotools decodes to exactly this mask.

    Polygons where they can say it, uncompressed RLE for masks with holes. Contours are traced at twice the resolution:
    they then run a quarter pixel inside the mask's edge, between the pixel centres that decide membership.

    Args:
        mask: (H, W) bool with at least one pixel.

    Returns:
        list or dict: Polygons as [x1, y1, x2, y2, ...] in pixels, or {"size": [H, W], "counts": [...]}.
    """
    doubled = mask.astype(np.uint8).repeat(2, 0).repeat(2, 1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if (hierarchy[0, :, 3] < 0).all():
        for tolerance in (1.5, 1.0, 0.0):  # in half pixels; the fewest points that still decode exactly
            polygons = [(cv2.approxPolyDP(c, tolerance, True).reshape(-1) + 0.5) / 2 for c in contours]
            if all(len(p) >= 6 for p in polygons) and np.array_equal(_decode_polygons(polygons, mask.shape), mask):
                return [p.tolist() for p in polygons]
    return uncompressed_rle(mask)


def uncompressed_rle(mask: np.ndarray) -> dict:
    """COCO's RLE with its counts as a list: runs of zeros and ones in turn, columns first, zeros to begin with."""
    flat = np.concatenate([[0], mask.ravel(order="F").astype(np.int8), [2]])
    ends = np.flatnonzero(np.diff(flat))
    return {"size": list(mask.shape), "counts": np.diff(np.concatenate([[0], ends])).tolist()}


def _decode_polygons(polygons: list[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    height, width = shape
    rles = coco_mask.frPyObjects([p.tolist() for p in polygons], height, width)
    return coco_mask.decode(coco_mask.merge(rles)).astype(bool)


def _check_parameters(**parameters: int) -> None:
    low = {"num_train": 1, "num_val": 1, "size": 64, "seed": 0}
    high = {"num_train": 500_000, "num_val": 500_000, "size": 4096, "seed": 2**63 - 1}
    for name, value in parameters.items():
        if not isinstance(value, int) or not low[name] <= value <= high[name]:
            raise InputError(f"{name}={value!r}: give an integer from {low[name]} to {high[name]}")


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_split(root: Path, split: str, *, first_id: int, count: int, size: int, seed: int) -> None:
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for index in range(count):
        # One generator per image: a longer split begins with the same images.
        rng = np.random.default_rng([seed, first_id, index])
        sides = size, int(size * rng.uniform(0.75, 1))
        width, height = sides if rng.random() < 0.5 else sides[::-1]
        empty = index % _EMPTY_EVERY == _EMPTY_EVERY - 1
        crowd = index % _CROWD_EVERY == _CROWD_EVERY // 2 and not empty
        picture, instances = draw_scene(height, width, rng=rng, crowd=crowd, empty=empty)
        image_id = first_id + index + 1
        name = f"{image_id:012d}.jpg"
        cv2.imwrite(str(root / split / name), picture, [cv2.IMWRITE_JPEG_QUALITY, 92])
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        annotations += [_annotation(each, image_id, number) for number, each in enumerate(instances, 1)]
    content = {
        "info": {"description": "mrla_mm generated shapes", "version": str(FORMAT_VERSION)},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES, 1)],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content, separators=(",", ":")))


def _annotation(instance: Instance, image_id: int, number: int) -> dict:
    rows, columns = extent(instance.visible)
    return {
        "id": image_id * 100 + number,
        "image_id": image_id,
        "category_id": instance.label + 1,
        "bbox": [columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start],
        "area": int(np.count_nonzero(instance.visible)),
        "iscrowd": int(instance.crowd),
        "segmentation": uncompressed_rle(instance.visible) if instance.crowd else segmentation_of(instance.visible),
    }
