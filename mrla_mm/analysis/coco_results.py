"""Detections of a COCO-format data set and what pycocotools says about them."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mmengine
import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mrla_mm.errors import InputError

SIZES = ("small", "medium", "large")
MAX_DETECTIONS = 100
_ALL = 0  # index of the size range that holds all objects


class DetectionSet(NamedTuple):
    """Ground truth and detections of the same images.

    Attributes:
        truth: annotations.
        results: by kind, "bbox" and where there are masks "segm", detections in COCO's results format.
        image_ids: images that were predicted.
        category_ids: of the classes.
        classes: their names.
    """

    truth: COCO
    results: Mapping[str, list[dict]]
    image_ids: Sequence[int]
    category_ids: Sequence[int]
    classes: Sequence[str]


def read_detections(
    path: str | Path, truth: COCO, *, category_ids: Sequence[int], classes: Sequence[str]
) -> DetectionSet:
    """Read what `tools/test.py --out FILE.pkl` wrote, or a JSON file in COCO's results format.

    A pickle file can run code as it is read: give only files that you wrote. The images are those of the pickle file,
    or for JSON all that are annotated.

    Raises:
        InputError: the file is missing, is of neither form or is about another data set.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"results file {path} does not exist: write one with tools/test.py --out FILE.pkl")
    try:
        records = mmengine.load(path)
    except Exception as error:  # a broken pickle file can raise anything
        raise InputError(neither(path, error)) from error
    if not isinstance(records, list):
        raise InputError(neither(path, TypeError(f"it holds a {type(records).__name__}, not a list")))
    try:
        if records and "pred_instances" in records[0]:
            image_ids = [record["img_id"] for record in records]
            boxes = [found for record in records for found in unpack(record, category_ids)]
        else:
            image_ids, boxes = truth.getImgIds(), [dict(one, score=float(one["score"])) for one in records]
        check_numbers(boxes)
        check_same_data(records, boxes, truth)
    except InputError as error:
        raise InputError(
            f"results file {path} is about another data set than the config's test_dataloader: {error}"
        ) from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(neither(path, error)) from error
    masks = bool(boxes) and all("segmentation" in one for one in boxes)
    results = {"bbox": boxes} | ({"segm": boxes} if masks else {})
    return DetectionSet(truth, results, sorted(image_ids), tuple(category_ids), tuple(classes))


def neither(path: Path, reason: Exception) -> str:
    """Return the message for a file that holds no predictions."""
    detail = f"{type(reason).__name__}: {reason}"[:200]
    return f"results file {path} is neither of tools/test.py nor in COCO's results format ({detail})"


def check_numbers(boxes: Sequence[dict]) -> None:
    """Raise KeyError, TypeError or ValueError unless every detection has a box and a score, and masks are encoded."""
    for one in boxes:
        if not np.isfinite([*np.reshape(one["bbox"], 4), one["score"]]).all():
            raise ValueError(f"a box {one['bbox']} or its score {one['score']} is no number")
        mask = one.get("segmentation", {"size": (), "counts": ()})
        if not isinstance(mask, dict) or not {"size", "counts"} <= set(mask):
            raise ValueError("a mask is not run-length encoded, with size and counts")


def check_same_data(records: Sequence[dict], boxes: Sequence[dict], truth: COCO) -> None:
    """Raise InputError if images, their names and sizes, or categories are not those of the annotations.

    An image may be turned: mmdet loads it as its EXIF entry says, which those who note height and width often do not.
    """
    named = [record for record in records if "img_id" in record]
    foreign = {one["image_id"] for one in boxes}.union(record["img_id"] for record in named) - set(truth.imgs)
    unknown = {one["category_id"] for one in boxes} - set(truth.cats)
    for kind, ids in (("images", foreign), ("categories", unknown)):
        if ids:
            raise InputError(f"the annotations lack {len(ids)} of its {kind}, the first is {sorted(ids, key=str)[0]}")
    for record in named:
        name = Path(truth.imgs[record["img_id"]]["file_name"]).name
        if Path(record.get("img_path", name)).name != name:
            raise InputError(f"its image {record['img_id']} is {record['img_path']}, that of the annotations {name}")
    sizes = [(record["img_id"], record["ori_shape"][:2], True) for record in named if record.get("ori_shape")]
    sizes += [(one["image_id"], one["segmentation"]["size"], False) for one in boxes if "segmentation" in one]
    for image_id, size, may_be_turned in sizes:
        annotated = truth.imgs[image_id]["height"], truth.imgs[image_id]["width"]
        if tuple(size) != annotated and not (may_be_turned and tuple(size) == annotated[::-1]):
            raise InputError(
                f"its image {image_id} has the height and width {tuple(size)}, that of the annotations {annotated}"
            )


def unpack(record: dict, category_ids: Sequence[int]) -> list[dict]:
    """Return an image's detections in COCO's results format.

    Raises:
        InputError: a label is not among the classes.
    """
    found = record["pred_instances"]
    boxes = np.asarray(found["bboxes"], float).reshape(-1, 4)
    boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    scores, labels = np.asarray(found["scores"], float).tolist(), np.asarray(found["labels"]).tolist()
    other = [label for label in labels if not 0 <= label < len(category_ids)]
    if other:
        raise InputError(f"it has a label {other[0]}, but there are {len(category_ids)} classes, from 0")
    detections = [
        dict(image_id=record["img_id"], category_id=category_ids[label], bbox=box, score=score)
        for box, score, label in zip(boxes, scores, labels, strict=True)
    ]
    for detection, mask in zip(detections, found.get("masks", ()), strict=False):
        detection["segmentation"] = mask
    return detections


def evaluate(found: DetectionSet, kind: str = "bbox", *, iou_thresholds: Sequence[float] | None = None) -> COCOeval:
    """Return pycocotools' evaluation, accumulated, at most 100 detections of a class in an image.

    Args:
        found: ground truth and detections.
        kind: "bbox" or "segm".
        iou_thresholds: instead of 0.5, 0.55 to 0.95.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        detections = load_results(found.truth, found.results[kind], kind)
        evaluation = COCOeval(found.truth, detections, kind)
        evaluation.params.imgIds = list(found.image_ids)
        evaluation.params.catIds = list(found.category_ids)
        evaluation.params.maxDets = [1, 10, MAX_DETECTIONS]
        if iou_thresholds is not None:
            evaluation.params.iouThrs = np.array(iou_thresholds)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def load_results(truth: COCO, results: list[dict], kind: str) -> COCO:
    """Return results as pycocotools holds them; its own loader fails where nothing was detected."""
    if not results:
        empty = COCO()
        empty.dataset = dict(images=truth.dataset["images"], categories=truth.dataset["categories"], annotations=[])
        empty.createIndex()
        return empty
    dropped = {"segm": "bbox", "bbox": None}[kind]  # with boxes it would take masks' objects for the boxes
    return truth.loadRes([{key: value for key, value in one.items() if key != dropped} for one in results])


def mean_known(values: np.ndarray) -> float:
    """Mean over what is known; pycocotools marks classes and sizes without an object by -1. NaN if nothing is known."""
    values = values[values > -1]
    return float(values.mean()) if values.size else float("nan")


def summary(evaluation: COCOeval) -> dict[str, float]:
    """Return average precision and recall, by size too."""
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]  # (T, R, K, A, M), (T, K, A, M)
    thresholds = evaluation.params.iouThrs
    figures = {"AP": mean_known(precision[:, :, :, _ALL, -1])}
    for threshold in (0.5, 0.75):
        at = np.isclose(thresholds, threshold)
        figures[f"AP{round(100 * threshold)}"] = mean_known(precision[at][:, :, :, _ALL, -1])
    for index, size in enumerate(SIZES, 1):
        figures[f"AP {size}"] = mean_known(precision[:, :, :, index, -1])
    figures["AR"] = mean_known(recall[:, :, _ALL, -1])
    for index, size in enumerate(SIZES, 1):
        figures[f"AR {size}"] = mean_known(recall[:, :, index, -1])
    return figures


def class_figures(evaluation: COCOeval, found: DetectionSet) -> list[dict]:
    """Return for each class its name, number of objects, AP, AP50, AP75 and AR, NaN where there is no object."""
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
    thresholds = evaluation.params.iouThrs
    counts = object_counts(found)
    rows = []
    for index, (category, name) in enumerate(zip(found.category_ids, found.classes, strict=True)):
        row = {"class": name, "objects": counts.get(category, 0), "AP": mean_known(precision[:, :, index, _ALL, -1])}
        for threshold in (0.5, 0.75):
            at = np.isclose(thresholds, threshold)
            row[f"AP{round(100 * threshold)}"] = mean_known(precision[at][:, :, index, _ALL, -1])
        rows.append(row | {"AR": mean_known(recall[:, index, _ALL, -1])})
    return rows


def object_counts(found: DetectionSet) -> dict[int, int]:
    """Return the number of objects of each category in the images, crowds apart."""
    wanted, counts = set(found.image_ids), {}
    for one in found.truth.dataset["annotations"]:
        if one["image_id"] in wanted and not one.get("iscrowd", 0):
            counts[one["category_id"]] = counts.get(one["category_id"], 0) + 1
    return counts


def size_counts(found: DetectionSet) -> dict[str, int]:
    """Return the number of small, medium and large objects by COCO's limits, 32^2 and 96^2 pixels, crowds apart."""
    wanted = set(found.image_ids)
    areas = [
        one["area"]
        for one in found.truth.dataset["annotations"]
        if one["image_id"] in wanted and not one.get("iscrowd", 0)
    ]
    bins = np.histogram(areas, [0, 32**2, 96**2, np.inf])[0]
    return dict(zip(SIZES, bins.tolist(), strict=True))
