"""The quick start's generated data: shapes on a textured ground, in COCO's format with masks."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

from mrla_mm.errors import InputError

MANIFEST = "shapes.json"  # with the parameters that the data were written with
SPLITS = {"train2017": 1, "val2017": 500_001}  # first image id of each split
MIN_VISIBLE = 0.6  # part of a shape that later shapes must leave visible
MIN_PIXELS = 24
MIN_CONTRAST = 90.0  # distance in RGB between a shape and the mean colour of what it covers


def polygon(*radii: float) -> np.ndarray:
    """Return the corners (n, 2) of a polygon around the origin, at equal angles."""
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return np.array(radii)[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)


CIRCLE = polygon(*[1] * 36)
HALF_CROSS = [[0.95, 0.28], [0.28, 0.28], [0.28, 0.95], [-0.28, 0.95], [-0.28, 0.28], [-0.95, 0.28]]
OUTLINES = {  # contours of each shape at radius 1; a second one cuts a hole
    "circle": [CIRCLE],
    "rectangle": [np.array([[0.84, 0.54], [-0.84, 0.54], [-0.84, -0.54], [0.84, -0.54]])],
    "triangle": [polygon(1, 1, 1)],
    "star": [polygon(*[1, 0.45] * 5)],
    "ring": [CIRCLE, 0.55 * CIRCLE],
    "cross": [np.concatenate([HALF_CROSS, np.negative(HALF_CROSS)])],
}
CLASSES = tuple(OUTLINES)


def shape_mask(
    name: str, height: int, width: int, *, centre: np.ndarray, radius: float, angle: float
) -> np.ndarray:
    """Return the pixels (H, W) of a shape at (x, y), turned by an angle in radians."""
    cos = np.cos(angle)
    sin = np.sin(angle)
    turn = radius * np.array([[cos, sin], [-sin, cos]])
    contours = [np.int32(16 * (outline @ turn + centre - 0.5)) for outline in OUTLINES[name]]
    mask = np.zeros((height, width), np.uint8)
    cv2.fillPoly(mask, contours, 1, shift=4)  # corners in sixteenths of a pixel
    return mask.astype(bool)


def texture(rng: np.random.Generator, size: tuple[int, int], spread: float) -> np.ndarray:
    """Return smooth noise (H, W, 3) of up to `spread` to either side of zero."""
    noise = rng.uniform(-1, 1, (8, 8, 1)) * rng.uniform(-spread, spread, 3)
    return cv2.resize(noise, size[::-1], interpolation=cv2.INTER_CUBIC)


def draw_scene(size: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, list]:
    """Return a picture (H, W, 3) uint8, and the label and visible pixels (H, W) of each shape.

    Shapes are painted from large to small; one that would hide too much of another is left out.
    """
    canvas = rng.uniform(20, 120, 3) + texture(rng, size, 35)
    labels = []
    sizes = []
    visible = []
    radii = 0.07 * max(size) * 6 ** rng.random(rng.integers(3, 10))
    for radius in np.sort(radii)[::-1]:
        label = int(rng.integers(len(CLASSES)))
        centre = rng.uniform(0.5 * radius, np.array(size[::-1]) - 0.5 * radius)
        angle = rng.uniform(-0.35, 0.35)
        mask = shape_mask(CLASSES[label], *size, centre=centre, radius=radius, angle=angle)
        rest = [each & ~mask for each in visible] + [mask]
        needed = np.maximum(MIN_PIXELS, MIN_VISIBLE * np.array([*sizes, mask.sum()]))
        if np.any(np.sum(rest, axis=(1, 2)) < needed):
            continue
        colour = rng.uniform(90, 250, 3)
        while np.linalg.norm(colour - canvas[mask].mean(0)) < MIN_CONTRAST:
            colour = rng.uniform(90, 250, 3)
        canvas[mask] = (colour + texture(rng, size, 15))[mask]
        visible = rest
        sizes.append(mask.sum())
        labels.append(label)
    canvas += rng.normal(0, 5, canvas.shape)
    picture = np.clip(canvas, 0, 255).astype(np.uint8)
    return picture, list(zip(labels, visible, strict=True))


def generate_shapes(
    root: str | Path, *, num_train: int = 800, num_val: int = 100, size: int = 160, seed: int = 0
) -> None:
    """Write the data set unless one of the same parameters is there.

    The same parameters give the same bytes; `size` is the longer side of the images in pixels.
    Raises InputError if `root` holds anything else.
    """
    root = Path(root).absolute()
    manifest = json.dumps(dict(seed=seed, size=size, num_train=num_train, num_val=num_val))
    written = root / MANIFEST
    if written.is_file() and written.read_text() == manifest:
        return
    if root.exists():
        raise InputError(f"{root} exists with other contents: delete it or give another")
    staging = root.with_name(f".{root.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    for (split, first_id), count in zip(SPLITS.items(), (num_train, num_val), strict=True):
        write_split(staging, split, first_id=first_id, count=count, size=size, seed=seed)
    (staging / MANIFEST).write_text(manifest)
    staging.rename(root)


def write_split(root: Path, split: str, *, first_id: int, count: int, size: int, seed: int) -> None:
    """Write images and annotation file of a split; a longer one begins with the same images."""
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images = []
    annotations = []
    for image_id in range(first_id, first_id + count):
        rng = np.random.default_rng([seed, image_id])
        sides = [size, int(size * rng.uniform(0.75, 1))]
        height, width = rng.permutation(sides).tolist()
        picture, shapes = draw_scene((height, width), rng)
        name = f"{image_id:012d}.jpg"
        cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tofile(root / split / name)
        images.append(dict(id=image_id, file_name=name, width=width, height=height))
        for number, (label, mask) in enumerate(shapes, 1):
            runs = coco_mask.encode(np.asfortranarray(mask, np.uint8))
            ids = dict(id=image_id * 100 + number, image_id=image_id, category_id=label + 1)
            box = dict(bbox=coco_mask.toBbox(runs).tolist(), area=int(coco_mask.area(runs)))
            encoded = dict(size=[height, width], counts=runs["counts"].decode())
            annotations.append(ids | box | dict(segmentation=encoded, iscrowd=0))
    categories = [dict(id=number, name=name) for number, name in enumerate(CLASSES, 1)]
    content = dict(images=images, annotations=annotations, categories=categories)
    (root / f"annotations/instances_{split}.json").write_text(json.dumps(content))
