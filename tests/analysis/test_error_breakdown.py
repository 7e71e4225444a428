"""Each kind of error on cases made by hand, with the AP that mending it gives; and agreement with pycocotools."""

import numpy as np
import pytest

from mrla_mm.analysis.coco_results import evaluate, mean_known
from mrla_mm.analysis.confusion import confused_pairs, confusion_matrix
from mrla_mm.analysis.error_breakdown import KINDS, average_precision, error_breakdown
from tests.analysis.coco_cases import detection_set

A, B, C = (10, 10, 40, 40), (100, 10, 40, 40), (10, 110, 40, 40)
SHIFTED = (30, 10, 40, 40)  # IoU with A: 20 / 60 = 1/3
FAR = (150, 150, 20, 20)
HIT = (1, "cat", A, 0.9)


def only(errors, kind):
    """Whether all errors are of one kind."""
    return {name: count for name, count in errors.counts.items() if count} == {kind: 1}


def test_no_error():
    errors = error_breakdown(detection_set([(1, "cat", A), (1, "dog", B)], [HIT, (1, "dog", B, 0.8)]))
    assert errors.ap50 == pytest.approx(1)
    assert set(errors.counts.values()) == {0}
    assert list(errors.gains.values()) == pytest.approx([0] * len(KINDS))
    assert (errors.gain_false_positives, errors.gain_false_negatives) == pytest.approx((0, 0))


# Two cats, of which one is found. The AP of one class at recalls 0 to 1 in steps of 0.01: the 51 recalls up to 0.5 are
# reached by the first hit.
HALF = 51 / 101


def test_classification_error():
    errors = error_breakdown(detection_set([(1, "cat", A), (1, "cat", B)], [HIT, (1, "dog", B, 0.8)]))
    assert only(errors, "classification")
    assert errors.ap50 == pytest.approx(HALF)  # there is no dog, so its class does not count
    assert errors.gains["classification"] == pytest.approx(1 - HALF)
    assert errors.gains["missed"] == 0, "an object with a classification error is not missed as well"
    assert errors.gain_false_negatives == pytest.approx(1 - HALF)


def test_localisation_error():
    errors = error_breakdown(
        detection_set([(1, "cat", A), (1, "cat", B)], [(1, "cat", B, 0.9), (1, "cat", SHIFTED, 0.8)])
    )
    assert only(errors, "localisation")
    assert errors.ap50 == pytest.approx(HALF)
    assert errors.gains["localisation"] == pytest.approx(1 - HALF)


def test_several_wrong_boxes_of_one_object_mend_to_one():
    wrong = [(1, "cat", SHIFTED, 0.8), (1, "cat", (32, 10, 40, 40), 0.7)]
    errors = error_breakdown(detection_set([(1, "cat", A), (1, "cat", B)], [(1, "cat", B, 0.9), *wrong]))
    assert errors.counts["localisation"] == 2
    assert errors.gains["localisation"] == pytest.approx(1 - HALF)
    taken = error_breakdown(detection_set([(1, "cat", A)], [HIT, wrong[0]]))
    assert taken.counts["localisation"] == 1
    assert taken.gains["localisation"] == pytest.approx(0), "the object is detected already"


def test_duplicate():
    # precision 1, then 1/2 at the duplicate, 2/3 at the last hit: recalls above 0.5 get 2/3
    detections = [HIT, (1, "cat", (11, 10, 40, 40), 0.8), (1, "cat", B, 0.7)]
    errors = error_breakdown(detection_set([(1, "cat", A), (1, "cat", B)], detections))
    assert only(errors, "duplicate")
    assert errors.ap50 == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert errors.gains["duplicate"] == pytest.approx(1 - errors.ap50)
    assert errors.gain_false_positives == pytest.approx(1 - errors.ap50)


@pytest.mark.parametrize(("kind", "wrong"), [("background", ("cat", FAR)), ("both", ("dog", SHIFTED))])
def test_background_and_both(kind, wrong):
    objects = [(1, "cat", A), (1, "dog", B)]
    errors = error_breakdown(detection_set(objects, [(1, *wrong, 0.95), HIT, (1, "dog", B, 0.8)]))
    assert only(errors, kind)
    assert errors.ap50 == pytest.approx(0.75)  # the class with the wrong detection first has precision 1/2
    assert errors.gains[kind] == pytest.approx(0.25)


def test_missed():
    errors = error_breakdown(detection_set([(1, "cat", A), (1, "cat", C)], [HIT]))
    assert only(errors, "missed")
    assert errors.gains["missed"] == pytest.approx(1 - HALF)
    assert errors.gain_false_negatives == pytest.approx(1 - HALF)


def test_what_lies_on_a_crowd_is_no_error():
    found = detection_set([(1, "cat", A)], [HIT, (1, "cat", FAR, 0.95)], crowds=[(1, "cat", (140, 140, 50, 50))])
    errors = error_breakdown(found)
    assert set(errors.counts.values()) == {0} and errors.ap50 == pytest.approx(1)
    assert confusion_matrix(found).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_nothing_detected_and_nothing_there():
    errors = error_breakdown(detection_set([(1, "cat", A)], []))
    assert errors.ap50 == 0 and only(errors, "missed")
    errors = error_breakdown(detection_set([], [(1, "cat", A, 0.9)]))
    assert errors.ap50 == 0 and only(errors, "background")


def random_set(seed, images=12):
    rng = np.random.default_rng(seed)
    objects, detections = [], []
    for image in range(1, images + 1):
        for _ in range(rng.integers(0, 5)):
            name, box = rng.choice(["cat", "dog", "cow"]), (*rng.integers(0, 150, 2), *rng.integers(15, 50, 2))
            objects.append((image, name, box))
            for _ in range(rng.integers(0, 4)):
                moved = tuple(np.add(box, rng.integers(-12, 13, 4)).clip(5))
                guess = name if rng.random() < 0.8 else "dog"
                detections.append((image, guess, moved, float(rng.random())))
    crowds = [(1, "cat", (0, 0, 90, 90))]
    return detection_set(objects, detections, images=images, classes=("cat", "dog", "cow"), crowds=crowds)


@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_pycocotools(seed):
    found = random_set(seed)
    errors = error_breakdown(found)
    official = mean_known(evaluate(found).eval["precision"][0, :, :, 0, -1])
    assert 0.05 < official < 0.95
    assert errors.ap50 == pytest.approx(official)
    assert all(errors.counts.values()), "every kind must occur for the test to mean anything"
    assert min(errors.gains.values()) >= -1e-12


def test_masks_are_matched_as_masks():
    found = detection_set([(1, "cat", A)], [HIT])
    half = dict(found.results["bbox"][0])  # the box of A, but a mask of its left quarter
    x, y, _, h = A
    rle = found.truth.annToRLE(dict(image_id=1, segmentation=[[x, y, x + 12, y, x + 12, y + h, x, y + h]]))
    found = found._replace(results={"bbox": [half], "segm": [half | dict(segmentation=rle)]})
    assert error_breakdown(found, "bbox").counts["localisation"] == 0
    assert error_breakdown(found, "segm").counts["localisation"] == 1


def test_average_precision_by_hand():
    score, hit = np.array([0.9, 0.8, 0.7]), np.array([True, False, True])
    assert average_precision(score, hit, 4) == pytest.approx((26 * 1 + 25 * 2 / 3) / 101)
    assert average_precision(np.array([]), np.array([], bool), 3) == 0


def test_confusion_matrix():
    objects = [(1, "cat", A), (1, "cat", B), (1, "dog", C)]
    detections = [HIT, (1, "dog", B, 0.8), (1, "dog", FAR, 0.7), (1, "dog", C, 0.2)]
    counts = confusion_matrix(detection_set(objects, detections), score_thr=0.3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert confused_pairs(counts, ("cat", "dog")) == [("cat", "dog", 1)]
    assert confusion_matrix(detection_set(objects, detections), score_thr=0.1)[1].tolist() == [0, 1, 0]
