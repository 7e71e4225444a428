"""Which classes a detector takes for which."""

import numpy as np

from mrla_mm.analysis.coco_results import DetectionSet
from mrla_mm.analysis.error_breakdown import FOREGROUND, overlaps

SHOWN_PAIRS = 15


def confusion_matrix(found: DetectionSet, *, score_thr: float = 0.3) -> np.ndarray:
    """Count which class was taken for which: (K + 1, K + 1), row: the truth, column: the prediction, last: background.

    Detections take objects in order of score, each the one of its class that it overlaps most, else of any class, with
    an IoU of their boxes of at least 0.5. Detections on crowds of their class are left out.

    Args:
        found: ground truth and detections.
        score_thr: Detections below it are left out.
    """
    label = {category: index for index, category in enumerate(found.category_ids)}
    counts = np.zeros((len(label) + 1, len(label) + 1), int)
    per_image: dict[int, list[dict]] = {}
    for one in found.results["bbox"]:
        if one["score"] >= score_thr and one["category_id"] in label:
            per_image.setdefault(one["image_id"], []).append(one)
    for image_id in found.image_ids:
        objects = [one for one in found.truth.imgToAnns[image_id] if one["category_id"] in label]
        detections = sorted(per_image.get(image_id, ()), key=lambda one: -one["score"])
        count_image(counts, detections, objects, found)
    return counts


def count_image(counts: np.ndarray, detections: list[dict], objects: list[dict], found: DetectionSet):
    """Add an image's detections, best first, and objects to the counts."""
    label = {category: index for index, category in enumerate(found.category_ids)}
    crowds = [one for one in objects if one.get("iscrowd", 0)]
    objects = [one for one in objects if not one.get("iscrowd", 0)]
    truth, predicted = (np.array([label[one["category_id"]] for one in some], int) for some in (objects, detections))
    iou = overlaps(detections, objects, found, "bbox")
    of_crowd = np.array([label[one["category_id"]] for one in crowds], int)
    covered = overlaps(detections, crowds, found, "bbox", crowd=True)
    on_crowd = (covered >= FOREGROUND) & (predicted[:, None] == of_crowd)
    free = np.ones(len(objects), bool)
    for row, taken_for in enumerate(predicted):
        fit = np.where(free & (iou[row] >= FOREGROUND), iou[row] + (truth == taken_for), 0)
        if fit.any():
            best = int(fit.argmax())
            free[best] = False
            counts[truth[best], taken_for] += 1
        elif not on_crowd[row].any():
            counts[-1, taken_for] += 1
    np.add.at(counts[:, -1], truth[free], 1)


def confused_pairs(counts: np.ndarray, classes) -> list[tuple[str, str, int]]:
    """Return the `SHOWN_PAIRS` most frequent confusions of two classes: truth, prediction and count."""
    between = counts[:-1, :-1] * (1 - np.eye(len(classes), dtype=int))
    order = np.argsort(-between, axis=None, kind="mergesort")[:SHOWN_PAIRS]
    pairs = (np.unravel_index(index, between.shape) for index in order)
    return [(classes[row], classes[column], int(between[row, column])) for row, column in pairs if between[row, column]]
