"""Reading predictions in both forms, and the figures that are taken from pycocotools' evaluation."""

import json
import pickle

import numpy as np
import pytest
import torch

from mrla_mm.analysis.coco_results import class_figures, evaluate, read_detections, size_counts, summary
from mrla_mm.errors import InputError
from tests.analysis.coco_cases import CLASSES, detection_set

SMALL, LARGE = (10, 10, 20, 20), (60, 60, 120, 120)


def small_and_large():
    objects = [(1, "cat", SMALL), (2, "dog", LARGE)]
    return detection_set(objects, [(1, "cat", SMALL, 0.9)], images=2, crowds=[(1, "dog", (100, 100, 90, 90))])


def test_figures_by_size_and_class():
    found = small_and_large()
    figures = summary(evaluate(found))
    assert [figures[name] for name in ("AP", "AP50", "AP75")] == pytest.approx([0.5] * 3)
    assert figures["AP small"] == pytest.approx(1) and figures["AP large"] == 0
    assert np.isnan(figures["AP medium"]) and figures["AR"] == pytest.approx(0.5)
    cat, dog = class_figures(evaluate(found), found)
    assert (cat["class"], cat["objects"], cat["AP"]) == ("cat", 1, pytest.approx(1))
    assert (dog["class"], dog["objects"], dog["AP"]) == ("dog", 1, 0)
    assert size_counts(found) == dict(small=1, medium=0, large=1)


def test_nothing_detected():
    found = small_and_large()._replace(results={"bbox": []})
    assert summary(evaluate(found))["AP"] == 0


def record(image_id, boxes, scores, labels, **more):
    instances = dict(bboxes=torch.tensor(boxes), scores=torch.tensor(scores), labels=torch.tensor(labels))
    return dict(img_id=image_id, pred_instances=instances | more)


def test_the_pickle_file_of_the_test_tool(tmp_path):
    truth = small_and_large().truth
    mask = truth.annToRLE(truth.anns[1])
    first = record(1, [[10.0, 10, 30, 30]], [0.75], [0], masks=[mask])
    path = tmp_path / "predictions.pkl"
    path.write_bytes(pickle.dumps([first, record(2, np.zeros((0, 4)).tolist(), [], [])]))
    found = read_detections(path, truth, category_ids=[11, 12], classes=CLASSES)
    assert found.image_ids == [1, 2]
    (detection,) = found.results["bbox"]
    assert detection == dict(image_id=1, category_id=11, bbox=[10, 10, 20, 20], score=0.75, segmentation=mask)
    assert summary(evaluate(found, "segm"))["AP"] == pytest.approx(0.5)


def test_cocos_results_format(tmp_path):
    found = small_and_large()
    path = tmp_path / "predictions.bbox.json"
    path.write_text(json.dumps(found.results["bbox"]))
    read = read_detections(path, found.truth, category_ids=found.category_ids, classes=CLASSES)
    assert read.results == found.results and read.image_ids == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist: write one with tools/test.py"),
        ("{}", "is neither of tools/test.py nor in COCO's results format .TypeError: it holds a dict, not a list"),
        ("[1, 2]", "is neither of tools/test.py nor in COCO's results format"),
        ("[[", "is neither of tools/test.py nor in COCO's results format"),
        ('[{"image_id": 1, "category_id": 11, "bbox": [1, 2], "score": 1}]', "cannot reshape array of size 2"),
        ('[{"image_id": 1, "category_id": 11, "bbox": [1, 1, 2, 2], "score": NaN}]', "its score nan is no number"),
        (
            '[{"image_id": 1, "category_id": 11, "bbox": [1, 1, 2, 2], "score": 1, "segmentation": [[1, 1, 2, 2, 3]]}]',
            "a mask is not run-length encoded",
        ),
        (
            '[{"image_id": 1, "category_id": 11, "bbox": [1, 1, 2, 2], "score": 1, '
            '"segmentation": {"size": [50, 60], "counts": "X"}}]',
            r"its image 1 has the height and width \(50, 60\), that of the annotations \(200, 200\)",
        ),
        ('[{"image_id": 1, "category_id": 90, "bbox": [1, 1, 2, 2], "score": 1}]', "lack 1 of its categories.* is 90"),
        ('[{"image_id": 1}]', "is neither of tools/test.py nor in COCO's results format"),
        ('[{"image_id": 77, "category_id": 11, "bbox": [1, 1, 2, 2], "score": 1}]', "the first is 77"),
    ],
)
def test_files_that_do_not_fit(tmp_path, text, message):
    path = tmp_path / "predictions.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_detections(path, small_and_large().truth, category_ids=[11, 12], classes=CLASSES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=[79]), "it has a label 79, but there are 2 classes"),
        (dict(labels=[-1]), "it has a label -1, but there are 2 classes"),
        (dict(img_path="/data/other.jpg"), r"its image 1 is /data/other\.jpg, that of the annotations 1\.png"),
        (
            dict(ori_shape=(100, 200)),
            r"its image 1 has the height and width \(100, 200\), that of the annotations \(200, 200\)",
        ),
    ],
)
def test_predictions_of_another_data_set_with_the_same_image_numbers(change, message, tmp_path):
    labels = change.pop("labels", [0])
    path = tmp_path / "predictions.pkl"
    path.write_bytes(pickle.dumps([record(1, [[10.0, 10, 30, 30]], [0.75], labels) | change]))
    with pytest.raises(InputError, match=rf"{path} is about another data set than .*: {message}"):
        read_detections(path, small_and_large().truth, category_ids=[11, 12], classes=CLASSES)


def test_turned_images_are_the_annotations_own(tmp_path):
    """mmdet turns an image as its EXIF entry says; masks must be of the annotated size all the same."""
    truth = small_and_large().truth
    truth.imgs[1]["height"] = 150
    turned = record(1, [[10.0, 10, 30, 30]], [0.75], [0]) | dict(ori_shape=(200, 150))
    path = tmp_path / "predictions.pkl"
    path.write_bytes(pickle.dumps([turned]))
    assert len(read_detections(path, truth, category_ids=[11, 12], classes=CLASSES).results["bbox"]) == 1
    turned["pred_instances"]["masks"] = [dict(size=[200, 150], counts=b"X")]
    path.write_bytes(pickle.dumps([turned]))
    with pytest.raises(InputError, match=r"height and width \(200, 150\), that of the annotations \(150, 200\)"):
        read_detections(path, truth, category_ids=[11, 12], classes=CLASSES)
