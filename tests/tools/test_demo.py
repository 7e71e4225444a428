"""The demo's pictures and JSON, and what it says when it cannot work."""

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

from mrla_mm import cli
from mrla_mm.datasets.shapes import generate_shapes

from ..conftest import load_tool

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
CLASSIFIER = REPOSITORY / "configs/imagenet/resnet50_8xb32.py"
CLASSES = Config.fromfile(CONFIG).test_dataloader.dataset.metainfo.classes


@pytest.fixture(scope="module")
def demo():
    module = load_tool("demo")
    return lambda *arguments: cli.run(module.main, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights of an untrained detector with an even classifier: several classes above 0.1, none certain."""
    init_default_scope("mmdet")
    torch.manual_seed(0)
    cfg = Config.fromfile(CONFIG)
    model = MODELS.build(cfg.model)
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


def test_a_folder_gives_a_picture_of_each_and_one_json(demo, checkpoint, images, tmp_path):
    assert demo(images, CONFIG, checkpoint, "--out-dir", tmp_path, "--score-thr", 0.1, "--device", "cpu") == 0
    results = json.loads((tmp_path / "predictions.json").read_text())
    assert [each["image"] for each in results] == sorted(path.name for path in images.iterdir())
    model = init_detector(str(CONFIG), str(checkpoint), device="cpu")
    for result in results:
        original = cv2.imread(str(images / result["image"]))
        assert original.shape[:2] == (result["height"], result["width"])
        drawn = cv2.imread(str(tmp_path / result["image"].replace(".jpg", ".png")))
        plain = cv2.resize(original, drawn.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        changed = (np.abs(drawn.astype(int) - plain).max(-1) > 30).mean()
        assert changed > 0.02
        expected = inference_detector(model, str(images / result["image"])).pred_instances
        expected = expected[expected.scores >= 0.1]
        assert len(result["detections"]) == len(expected) > 0
        for index, found in enumerate(result["detections"]):
            assert found["class"] == CLASSES[found["label"]] == CLASSES[expected.labels[index]]
            assert found["score"] == pytest.approx(float(expected.scores[index]), abs=1e-3)
            assert found["bbox"] == pytest.approx(expected.bboxes[index].tolist(), abs=0.02)
            mask = coco_mask.decode(found["mask"])
            np.testing.assert_array_equal(mask.astype(bool), expected.masks[index].numpy())


RED, BLUE = [(255, 0, 0)] * 6, [(0, 0, 255)] * 6


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


def test_a_single_image_and_a_threshold_that_nothing_reaches(demo, checkpoint, images, tmp_path, capsys):
    image = next(images.iterdir())
    assert demo(image, CONFIG, checkpoint, "--out-dir", tmp_path, "--score-thr", 0.99) == 0
    best = inference_detector(init_detector(str(CONFIG), str(checkpoint), device="cpu"), str(image)).pred_instances
    said = f"{image.name}: 0 detections (the best scores {best.scores.max():.3g}, --score-thr is 0.99)"
    assert said in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "predictions.json").read_text())
    assert result["detections"] == []
    drawn, original = cv2.imread(str(tmp_path / f"{image.stem}.png")), cv2.imread(str(image))
    np.testing.assert_array_equal(drawn, cv2.resize(original, drawn.shape[1::-1], interpolation=cv2.INTER_CUBIC))


def test_images_of_any_depth_and_name_give_a_picture_each(demo, checkpoint, images, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    image = cv2.imread(str(next(images.iterdir())))
    cv2.imwrite(str(folder / "a.jpg"), image)
    cv2.imwrite(str(folder / "a.png"), image[..., 0])
    cv2.imwrite(str(folder / "b.png"), np.dstack([image, image[..., :1]]))
    cv2.imwrite(str(folder / "c.PNG"), image.astype(np.uint16) * 257)
    assert demo(folder, CONFIG, checkpoint, "--out-dir", tmp_path / "out", "--score-thr", 0.99) == 0
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"a.jpg.png", "a.png.png", "b.png", "c.png"}
    results = json.loads((tmp_path / "out/predictions.json").read_text())
    assert [each["image"] for each in results] == ["a.jpg", "a.png", "b.png", "c.PNG"]


def test_the_input_is_never_overwritten(demo, checkpoint, images, tmp_path, capsys):
    path = tmp_path / "picture.png"
    cv2.imwrite(str(path), cv2.imread(str(next(images.iterdir()))))
    before = path.read_bytes()
    for source in (path, tmp_path):
        assert demo(source, CONFIG, checkpoint, "--out-dir", tmp_path / "elsewhere/..") == 2
        assert "holds the input" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"no picture", b""])
def test_an_unreadable_image_is_named_and_the_others_are_kept(demo, checkpoint, images, tmp_path, capsys, content):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "broken.jpg").write_bytes(content)
    good = next(images.iterdir())
    (folder / "good.jpg").write_bytes(good.read_bytes())
    assert demo(folder, CONFIG, checkpoint, "--out-dir", tmp_path / "out") == 2
    printed = capsys.readouterr()
    assert "1 of 2 images cannot be read" in printed.err and "broken.jpg" in printed.err
    assert f"of the others are in {tmp_path / 'out'}" in printed.err and "are in" not in printed.out
    assert [each["image"] for each in json.loads((tmp_path / "out/predictions.json").read_text())] == ["good.jpg"]


def test_nothing_is_said_to_be_there_if_no_image_can_be_read(demo, checkpoint, tmp_path, capsys):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    assert demo(tmp_path / "broken.jpg", CONFIG, checkpoint, "--out-dir", tmp_path / "out") == 2
    printed = capsys.readouterr()
    assert "1 of 1 images cannot be read" in printed.err and "are in" not in printed.out + printed.err
    assert not list((tmp_path / "out").iterdir())


def test_wrong_arguments_end_with_one_message(demo, checkpoint, images, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.py"
    broken.write_text("a = 1\nb = c\n")
    torn = tmp_path / "torn.pth"
    torn.write_bytes(checkpoint.read_bytes()[:1000])
    other = tmp_path / "other.pth"
    torch.save({"state_dict": {"head.weight": torch.zeros(3)}}, other)
    cases = [
        ((tmp_path / "nothing", CONFIG, checkpoint), "nothing does not exist"),
        ((empty, CONFIG, checkpoint), "holds no image"),
        ((images, tmp_path / "no.py", checkpoint), "no.py does not exist"),
        ((images, broken, checkpoint), f"config file {broken}, line 2: NameError"),
        ((images, CLASSIFIER, checkpoint), "is no detector's (default_scope='mmpretrain')"),
        ((images, CONFIG, tmp_path / "no.pth"), "no.pth do not exist"),
        ((images, CONFIG, torn), "torn.pth are cut off"),
        ((images, CONFIG, other), "does not fit the model"),
        ((images, CONFIG, checkpoint, "--score-thr", "2"), "--score-thr 2"),
        ((images, CONFIG, checkpoint, "--out-dir", torn), "torn.pth cannot be made"),
        ((images, CONFIG, checkpoint, "--device", "cuda:99"), "--device cuda:99 cannot be used"),
    ]
    for arguments, message in cases:
        assert demo("--out-dir", tmp_path / "out", *arguments) == 2, arguments
        printed = capsys.readouterr().err
        assert message in printed
        assert "Traceback" not in printed
