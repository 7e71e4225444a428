"""The generated quick-start data set: textured shapes on a textured ground, in COCO layout with boxes and masks.

Shapes are inside tests at pixel centres, so that a mask and the pixels painted through it agree
exactly. The colour of a shape is independent of its class: only the outline tells the classes
apart.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

from mrla_mm.errors import InputError

FORMAT_VERSION = 2  # raise it when the same parameters give other pixels or annotations
MANIFEST = "shapes.json"
SPLITS = {"train2017": 0, "val2017": 500_000}  # first image id of each split, less one
MIN_VISIBLE = 0.6  # part of a shape that later shapes must leave visible
MIN_PIXELS = 24
MIN_CONTRAST = 90.0  # distance in RGB between a shape and the mean colour of what it covers


def star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Five-pointed star: each tenth of the turn is bounded by the line from a tip (radius 1) to a notch (0.45)."""
    half = np.pi / 5
    angle = np.abs((np.arctan2(v, u) + half) % (2 * half) - half)
    radius = np.hypot(u, v)
    notch_x, notch_y = 0.45 * np.cos(half), 0.45 * np.sin(half)
    return (radius * np.cos(angle) - 1) * notch_y - radius * np.sin(angle) * (notch_x - 1) <= 0


def triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Equilateral triangle in the unit circle."""
    slope = np.sqrt(3) / 2
    return (v <= 0.5) & (slope * u - v / 2 <= 0.5) & (-slope * u - v / 2 <= 0.5)


def cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Cross of two bars."""
    across, along = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return (across <= 0.28) & (along <= 0.95)


SHAPES = {  # whether points (u, v) lie in a shape of radius 1
    "circle": lambda u, v: np.hypot(u, v) <= 1,
    "rectangle": lambda u, v: (np.abs(u) <= 0.84) & (np.abs(v) <= 0.54),
    "triangle": triangle,
    "star": star,
    "ring": lambda u, v: (np.hypot(u, v) >= 0.55) & (np.hypot(u, v) <= 1),
    "cross": cross,
}
CLASSES = tuple(SHAPES)


@dataclass
class Instance:
    """A shape, or a crowd of tiny shapes: its label, the pixels (H, W) it was painted on, and those still visible."""

    label: int
    full: np.ndarray
    visible: np.ndarray
    crowd: bool = False


def shape_mask(
    name: str, height: int, width: int, *, centre: tuple[float, float], radius: float, angle: float
) -> np.ndarray:
    """Return the pixels (H, W) whose centres lie in a shape at (x, y), turned by an angle in radians."""
    mask = np.zeros((height, width), bool)
    left, top = (max(0, int(c - radius)) for c in centre)
    right, bottom = (int(c + radius) + 1 for c in centre)
    y, x = np.ogrid[top : min(bottom, height), left : min(right, width)]
    x, y = (x + 0.5 - centre[0]) / radius, (y + 0.5 - centre[1]) / radius
    cos, sin = np.cos(angle), np.sin(angle)
    mask[top:bottom, left:right] = SHAPES[name](cos * x + sin * y, cos * y - sin * x)
    return mask


def extent(mask: np.ndarray) -> tuple[slice, slice]:
    """Return rows and columns of the smallest box around the pixels of a mask, which has at least one."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def field(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return noise, a gradient, stripes or a checkerboard (H, W) in 0..1."""
    kind = rng.choice(["noise", "gradient", "stripes", "checker"])
    if kind == "noise":
        cells = [int(rng.integers(3, 9)), int(rng.integers(10, 25))]
        octaves = [
            cv2.resize(rng.random((n, n)), (width, height), interpolation=cv2.INTER_CUBIC)
            for n in cells
        ]
        return np.clip(0.65 * octaves[0] + 0.35 * octaves[1], 0, 1)
    angle = rng.uniform(0, np.pi)
    y, x = np.ogrid[:height, :width]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    if kind == "gradient":
        return (along - along.min()) / np.ptp(along)
    period = rng.uniform(8, 28)
    if kind == "stripes":
        return 0.5 + 0.5 * np.sin(2 * np.pi * along / period)
    return ((along // period + across // period) % 2).astype(float)


def texture(
    rng: np.random.Generator, height: int, width: int, *, colour: np.ndarray, spread: float
) -> np.ndarray:
    """Return a colour that varies by `spread` to either side along a random field: (H, W, 3)."""
    change = rng.uniform(-spread, spread, 3)
    return colour + (2 * field(rng, height, width)[..., None] - 1) * change


def swarm_mask(rng: np.random.Generator, height: int, width: int, *, name: str) -> np.ndarray:
    """Return many tiny shapes of one class scattered over an ellipse inside the picture: (H, W)."""
    scale = min(height, width)
    spread = scale * rng.uniform(0.12, 0.2, 2)
    middle = rng.uniform(0.25, 0.75, 2) * (width, height)
    union = np.zeros((height, width), bool)
    for _ in range(int(rng.integers(18, 36))):
        turn, distance = rng.uniform(0, 2 * np.pi), np.sqrt(rng.random())
        centre = middle + distance * spread * (np.cos(turn), np.sin(turn))
        radius = max(2.0, scale * rng.uniform(0.014, 0.022))
        union |= shape_mask(
            name, height, width, centre=centre, radius=radius, angle=rng.uniform(0, 2 * np.pi)
        )
    return union


def hides_too_much(mask: np.ndarray, instances: list[Instance]) -> bool:
    """Whether a shape would leave too little of an earlier one visible."""
    left = [
        (np.count_nonzero(old.visible & ~mask), np.count_nonzero(old.full)) for old in instances
    ]
    return any(visible < max(MIN_PIXELS, MIN_VISIBLE * full) for visible, full in left)


def draw_scene(
    height: int, width: int, *, rng: np.random.Generator, crowd: bool, empty: bool
) -> tuple[np.ndarray, list[Instance]]:
    """Return a picture (H, W, 3) uint8 and what it shows, in painting order: a later shape covers the earlier ones.

    All randomness is from `rng`; `crowd` adds a crowd of tiny shapes, `empty` leaves out all other
    shapes.
    """
    canvas = texture(rng, height, width, colour=rng.uniform(50, 205, 3), spread=35)
    instances: list[Instance] = []

    def paint(label: int, mask: np.ndarray, *, is_crowd: bool) -> None:
        ground, colour = canvas[mask].mean(0), rng.uniform(20, 235, 3)
        while np.linalg.norm(colour - ground) < MIN_CONTRAST:
            colour = rng.uniform(20, 235, 3)
        rows, columns = extent(mask)
        painted = texture(
            rng, rows.stop - rows.start, columns.stop - columns.start, colour=colour, spread=15
        )
        canvas[mask] = painted[mask[rows, columns]]
        for old in instances:
            old.visible = old.visible & ~mask
        instances.append(Instance(label, mask, mask, is_crowd))

    if crowd:
        label = int(rng.integers(len(CLASSES)))
        paint(label, swarm_mask(rng, height, width, name=CLASSES[label]), is_crowd=True)
    count = 0 if empty else int(rng.integers(2, 8))
    bands = np.array([[0.07, 0.12], [0.12, 0.25], [0.25, 0.5]]) * max(
        height, width
    )  # small, medium and large
    low, high = bands[rng.choice(3, count, p=[0.45, 0.35, 0.2])].T
    for radius in np.sort(low * (high / low) ** rng.random(count))[::-1]:
        label = int(rng.integers(len(CLASSES)))
        for _ in range(
            12
        ):  # a shape that would bury another is moved; one that finds no place is left out
            centre = rng.uniform(0.5 * radius, np.array([width, height]) - 0.5 * radius)
            angle = rng.uniform(-0.35, 0.35)
            mask = shape_mask(
                CLASSES[label], height, width, centre=centre, radius=radius, angle=angle
            )
            if np.count_nonzero(mask) >= MIN_PIXELS and not hides_too_much(mask, instances):
                paint(label, mask, is_crowd=False)
                break
    canvas += rng.normal(0, 5, canvas.shape)
    return np.clip(canvas, 0, 255).astype(np.uint8), instances


def generate_shapes(
    root: str | Path, *, num_train: int = 800, num_val: int = 100, size: int = 160, seed: int = 0
) -> bool:
    """Write the data set under `root` unless one of the same parameters is there; return whether it was written.

    The same parameters give the same bytes; `size` is the longer side of the images in pixels, at
    least 64. The set is built beside `root` and renamed into place.

    Raises:
        InputError: `root` holds something that this function did not write.
    """
    root = Path(root).absolute()
    manifest = json.dumps(
        dict(format=FORMAT_VERSION, num_train=num_train, num_val=num_val, size=size, seed=seed)
    )
    if (root / MANIFEST).is_file():
        if (root / MANIFEST).read_text() == manifest:
            return False
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise InputError(
            f"{root} exists and is not a generated data set: choose another folder, or remove it"
        )
    staging = root.with_name(f".{root.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    for (split, first_id), count in zip(SPLITS.items(), (num_train, num_val), strict=True):
        write_split(staging, split, first_id=first_id, count=count, size=size, seed=seed)
    (staging / MANIFEST).write_text(manifest)
    shutil.rmtree(root, ignore_errors=True)
    staging.rename(root)
    return True


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
        picture, instances = draw_scene(
            height, width, rng=rng, crowd=index % 8 == 4 and not empty, empty=empty
        )
        image_id = first_id + index + 1
        name = f"{image_id:012d}.jpg"
        cv2.imwrite(str(root / split / name), picture, [cv2.IMWRITE_JPEG_QUALITY, 92])
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        annotations += [
            annotation(each, image_id, number) for number, each in enumerate(instances, 1)
        ]
    content = {
        "info": {"description": "mrla_mm generated shapes", "version": str(FORMAT_VERSION)},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [
            {"id": i, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES, 1)
        ],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(
        json.dumps(content, separators=(",", ":"))
    )


def annotation(instance: Instance, image_id: int, number: int) -> dict:
    """Return the COCO annotation of an instance, its mask as compressed run lengths."""
    runs = coco_mask.encode(np.asfortranarray(instance.visible, np.uint8))
    return {
        "id": image_id * 100 + number,
        "image_id": image_id,
        "category_id": instance.label + 1,
        "bbox": coco_mask.toBbox(runs).tolist(),
        "area": int(coco_mask.area(runs)),
        "iscrowd": int(instance.crowd),
        "segmentation": {"size": list(instance.visible.shape), "counts": runs["counts"].decode()},
    }
