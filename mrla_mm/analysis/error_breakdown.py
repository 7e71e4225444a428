"""Which errors cost a detector how much AP: the breakdown of TIDE (Bolya et al., 2020).

pycocotools matches detections and objects at an IoU of FOREGROUND = 0.5. A detection that has no object of its class
is an error of the first kind that applies, with IoUs over the image's objects and BACKGROUND = 0.1:

    localisation    0.1 <= IoU < 0.5 with an object of its class
    classification  IoU >= 0.5 with an object of another class
    duplicate       IoU >= 0.5 with an object of its class, which a better-scoring detection has
    background      IoU < 0.1 with every object
    both            what is left: 0.1 <= IoU < 0.5 with an object of another class

and an object that has no detection, nor one with a localisation or classification error, is missed. dAP is what AP50
gains if an oracle mends all errors of one kind and leaves the others: it moves boxes and exchanges classes (of several
detections of one object the best stays, and none if the object is detected already), removes duplicates, both and
background, and takes missed objects out of the ground truth. A class without objects does not count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pycocotools import mask as mask_utils

from mrla_mm.analysis.coco_results import DetectionSet, evaluate

FOREGROUND, BACKGROUND = 0.5, 0.1
KINDS = ("classification", "localisation", "both", "duplicate", "background", "missed")
NONE = -1
_RECALLS = np.linspace(0, 1, 101)


class Matched(NamedTuple):
    """Detections of all images after matching, an entry each, those on crowds left out.

    Attributes:
        category, score, hit: class, score, and whether it has an object.
        error: index in KINDS, or NONE.
        target: annotation that an oracle would give it: its object, or that of its error; NONE for no such.
    """

    category: np.ndarray
    score: np.ndarray
    hit: np.ndarray
    error: np.ndarray
    target: np.ndarray


class ErrorBreakdown(NamedTuple):
    """What each kind of error costs.

    Attributes:
        ap50: AP at IoU 0.5.
        counts: number of errors by kind.
        gains: dAP by kind.
        gain_false_positives: AP50 gained if every wrong detection vanished.
        gain_false_negatives: AP50 gained if every object without a detection vanished.
    """

    ap50: float
    counts: dict[str, int]
    gains: dict[str, float]
    gain_false_positives: float
    gain_false_negatives: float


def error_breakdown(found: DetectionSet, kind: str = "bbox") -> ErrorBreakdown:
    """Sort the errors of a detector by kind and say what each costs.

    Args:
        found: ground truth and detections.
        kind: "bbox" or "segm", what IoUs are taken of.
    """
    matched, categories = match(found, kind)
    detected = set(matched.target[matched.hit].tolist())
    covered = detected | set(matched.target[np.isin(matched.error, [0, 1])].tolist())
    missed = [one for one in categories if one not in covered]
    base = mean_ap(matched, categories)
    gains = {}
    for index, name in enumerate(KINDS[:-1]):
        mended = reassign(matched, index, categories) if index < 2 else select(matched, matched.error != index)
        gains[name] = mean_ap(mended, categories) - base
    gains["missed"] = mean_ap(matched, without(categories, missed)) - base
    counts = {name: int((matched.error == index).sum()) for index, name in enumerate(KINDS)}
    counts["missed"] = len(missed)
    undetected = [one for one in categories if one not in detected]
    return ErrorBreakdown(
        base,
        counts,
        gains,
        mean_ap(select(matched, matched.hit), categories) - base,
        mean_ap(matched, without(categories, undetected)) - base,
    )


def match(found: DetectionSet, kind: str) -> tuple[Matched, dict[int, int]]:
    """Match detections and objects; return the detections, and the category of each object by its id."""
    evaluation = evaluate(found, kind, iou_thresholds=[FOREGROUND])
    per_image: dict[int, list[dict]] = {}
    for record in evaluation.evalImgs:
        if record is not None and list(record["aRng"]) == list(evaluation.params.areaRng[0]):
            per_image.setdefault(record["image_id"], []).append(record)
    parts, categories, known = [], {}, set(found.category_ids)
    for image_id in found.image_ids:
        objects = [one for one in found.truth.imgToAnns[image_id] if one["category_id"] in known]
        objects = [one for one in objects if not one.get("iscrowd", 0) and not one.get("ignore", 0)]
        categories |= {one["id"]: one["category_id"] for one in objects}
        parts.append(match_image(per_image.get(image_id, ()), objects, evaluation.cocoDt.anns, found, kind))
    return Matched(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), categories


def match_image(records: Sequence[dict], objects: list[dict], detections: dict, found: DetectionSet, kind: str):
    """Return an image's `Matched` from pycocotools' records of its classes."""
    ids, category, score, target = [], [], [], []
    for record in records:
        kept = ~record["dtIgnore"][0].astype(bool)
        ids += np.array(record["dtIds"])[kept].tolist()
        category += [record["category_id"]] * int(kept.sum())
        score += np.array(record["dtScores"])[kept].tolist()
        target += record["dtMatches"][0][kept].astype(int).tolist()
    category, target = np.array(category, int), np.array(target, int)
    hit = target > 0
    error, mended = sort_errors(
        overlaps([detections[one] for one in ids], objects, found, kind),
        category,
        np.array([one["category_id"] for one in objects], int),
        hit,
    )
    of_object = np.array([*(one["id"] for one in objects), NONE], int)
    return Matched(category, np.array(score, float), hit, error, np.where(hit, target, of_object[mended]))


def overlaps(
    detections: list[dict], objects: list[dict], found: DetectionSet, kind: str, *, crowd: bool = False
) -> np.ndarray:
    """IoU of each detection with each object; with crowds, the share of the detection that lies on each."""
    if not detections or not objects:
        return np.zeros((len(detections), len(objects)))
    if kind == "segm":
        shapes = [one["segmentation"] for one in detections], [found.truth.annToRLE(one) for one in objects]
    else:
        shapes = [one["bbox"] for one in detections], [one["bbox"] for one in objects]
    return np.asarray(mask_utils.iou(*shapes, [int(crowd)] * len(objects)))


def sort_errors(
    iou: np.ndarray, category: np.ndarray, object_category: np.ndarray, hit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kind of error of each detection, NONE for a hit, and the index of the object it is about, or NONE."""
    count = len(category)
    error, about = np.full(count, NONE), np.full(count, NONE)
    if iou.shape[1] == 0:
        error[~hit] = KINDS.index("background")
        return error, about
    same = category[:, None] == object_category[None]
    own, other = np.where(same, iou, 0), np.where(same, 0, iou)
    rules = [
        ("localisation", (own.max(1) >= BACKGROUND) & (own.max(1) < FOREGROUND), own.argmax(1)),
        ("classification", other.max(1) >= FOREGROUND, other.argmax(1)),
        ("duplicate", own.max(1) >= FOREGROUND, own.argmax(1)),
        ("background", iou.max(1) < BACKGROUND, np.full(count, NONE)),
        ("both", np.ones(count, bool), np.full(count, NONE)),
    ]
    for name, applies, which in rules:
        chosen = applies & ~hit & (error == NONE)
        error[chosen], about[chosen] = KINDS.index(name), which[chosen]
    return error, about


def reassign(matched: Matched, kind: int, categories: dict[int, int]) -> Matched:
    """Make the best detection of each object with this error a hit, unless the object has one, and drop the others."""
    taken = set(matched.target[matched.hit].tolist())
    hit, category, keep = matched.hit.copy(), matched.category.copy(), np.ones(len(matched.hit), bool)
    wrong = np.flatnonzero(matched.error == kind)
    for index in wrong[np.argsort(-matched.score[wrong], kind="mergesort")]:
        target = int(matched.target[index])
        keep[index] = target not in taken
        hit[index], category[index] = True, categories[target]
        taken.add(target)
    return select(matched._replace(hit=hit, category=category), keep)


def select(matched: Matched, keep: np.ndarray) -> Matched:
    """Detections that are kept."""
    return Matched(*(column[keep] for column in matched))


def without(categories: dict[int, int], gone: Sequence[int]) -> dict[int, int]:
    """Objects without some of them."""
    gone = set(gone)
    return {one: category for one, category in categories.items() if one not in gone}


def mean_ap(matched: Matched, categories: dict[int, int]) -> float:
    """Mean over the classes that have objects of their AP; 0 if there is none."""
    of_objects = np.array(list(categories.values()), int)
    found = []
    for category in np.unique(of_objects):
        chosen = matched.category == category
        positives = int((of_objects == category).sum())
        found.append(average_precision(matched.score[chosen], matched.hit[chosen], positives))
    return float(np.mean(found)) if found else 0.0


def average_precision(score: np.ndarray, hit: np.ndarray, positives: int) -> float:
    """COCO's AP at one IoU: mean over 101 recalls of the best precision at that recall or a larger one."""
    hits = hit[np.argsort(-score, kind="mergesort")].cumsum()
    precision = hits / np.arange(1, len(hits) + 1)
    precision = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(precision[np.searchsorted(hits / positives, _RECALLS, side="left")].mean())
