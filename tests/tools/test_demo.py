"""The demo's pictures and JSON."""

import copy
import json
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from pycocotools import mask as coco_mask

from mrla_mm.datasets import generate_shapes

from ..conftest import load_tool

CONFIG = Path(__file__).parents[2] / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
CLASSES = Config.fromfile(CONFIG).test_dataloader.dataset.metainfo.classes
RED, BLUE = [(255, 0, 0)] * 6, [(0, 0, 255)] * 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights of an untrained detector with an even classifier: several classes above 0.1, none certain."""
    init_default_scope("mmdet")
    torch.manual_seed(0)
    model = MODELS.build(Config.fromfile(CONFIG).model)
    model.init_weights()
    torch.nn.init.normal_(model.roi_head.bbox_head.fc_cls.weight, std=1e-5)
    path = tmp_path_factory.mktemp("weights") / "untrained.pth"
    torch.save({"state_dict": model.state_dict(), "meta": {"dataset_meta": {"classes": CLASSES}}}, path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes") / "set"
    generate_shapes(root, num_train=1, num_val=2, size=96)
    return root / "val2017"


def test_a_folder_gives_a_picture_of_each_and_one_json(run_tool, checkpoint, images, tmp_path):
    """The numbers are mmdet's own, and the pictures show them."""
    arguments = [images, CONFIG, checkpoint, "--out-dir", tmp_path, "--score-thr", 0.1, "--device", "cpu"]
    assert run_tool("demo", *arguments)[0] == 0
    results = json.loads((tmp_path / "predictions.json").read_text())
    assert [each["image"] for each in results] == sorted(path.name for path in images.iterdir())
    model = init_detector(str(CONFIG), str(checkpoint), device="cpu")
    for result in results:
        original = cv2.imread(str(images / result["image"]))
        assert original.shape[:2] == (result["height"], result["width"])
        drawn = cv2.imread(str(tmp_path / result["image"].replace(".jpg", ".png")))
        plain = cv2.resize(original, drawn.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        assert (np.abs(drawn.astype(int) - plain).max(-1) > 30).mean() > 0.02
        expected = inference_detector(model, str(images / result["image"])).pred_instances
        expected = expected[expected.scores >= 0.1]
        assert len(result["detections"]) == len(expected) > 0
        for index, found in enumerate(result["detections"]):
            assert found["class"] == CLASSES[found["label"]] == CLASSES[expected.labels[index]]
            assert found["score"] == pytest.approx(float(expected.scores[index]), abs=1e-3)
            assert found["bbox"] == pytest.approx(expected.bboxes[index].tolist(), abs=0.02)
            mask = coco_mask.decode(found["mask"])
            np.testing.assert_array_equal(mask.astype(bool), expected.masks[index].numpy())


def test_grey_and_deep_images_and_a_threshold_that_nothing_reaches(run_tool, checkpoint, images, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    image = cv2.imread(str(next(images.iterdir())))
    cv2.imwrite(str(folder / "grey.png"), image[..., 0])
    cv2.imwrite(str(folder / "deep.png"), image.astype(np.uint16) * 257)
    assert run_tool("demo", folder, CONFIG, checkpoint, "--out-dir", out, "--score-thr", 0.99)[0] == 0
    drawn = cv2.imread(str(out / "deep.png"))
    np.testing.assert_array_equal(drawn, cv2.resize(image, drawn.shape[1::-1], interpolation=cv2.INTER_CUBIC))
    assert [each["detections"] for each in json.loads((out / "predictions.json").read_text())] == [[], []]


def test_an_unreadable_image_is_named(run_tool, checkpoint, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    arguments = [tmp_path / "broken.jpg", CONFIG, checkpoint, "--out-dir", tmp_path / "out", "--device", "cpu"]
    code, errors = run_tool("demo", *arguments)
    assert code == 2 and "broken.jpg" in errors


@pytest.mark.parametrize("trained", [dict(dataset_meta=dict(CLASSES=CLASSES, PALETTE=BLUE)), dict(CLASSES=CLASSES), {}])
@pytest.mark.parametrize("palette", [None, RED])
def test_names_and_colours_are_those_of_mmdet(trained, palette, checkpoint, tmp_path):
    """Names of the checkpoint, colours of the config first; without names, the config's where mmdet takes COCO's."""
    cfg = Config.fromfile(CONFIG)
    cfg.test_dataloader.dataset.metainfo = dict(classes=CLASSES, palette=palette)
    path = tmp_path / "weights.pth"
    torch.save({**torch.load(checkpoint), "meta": trained}, path)
    with warnings.catch_warnings(record=True):  # it switches warnings on by itself
        expected = init_detector(copy.deepcopy(cfg), str(path), device="cpu").dataset_meta
    found = load_tool("demo").dataset_meta(cfg, trained)
    assert found["palette"] == expected["palette"]
    assert found["classes"] == (expected["classes"] if trained else CLASSES)
