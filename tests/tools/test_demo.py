"""The demo: mmdet's DetInferencer with every weight of the file, or none."""

import json

import pytest
import torch
from mmengine.config import Config

from mrla_mm.datasets import generate_shapes
from mrla_mm.inference import build_model

from ..conftest import ROOT

CONFIG = ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    state = build_model(Config.fromfile(CONFIG)).state_dict()
    state["roi_head.bbox_head.fc_cls.weight"].mul_(1e-3)
    return state


@pytest.fixture
def demo(tmp_path, run_tool, state):
    """Return `demo(prefix)`, which runs the tool on two images: code, errors and detections."""
    generate_shapes(tmp_path / "shapes", num_train=1, num_val=2, size=96)
    images = tmp_path / "shapes/val2017"
    first = min(images.iterdir())
    first.rename(first.with_suffix(".JPG"))  # as cameras write it
    (images / "._1.jpg").touch()  # as macOS leaves it in archives

    def demo(prefix):
        weights, out_dir = tmp_path / "file.pth", tmp_path / "out"
        torch.save({prefix + key: value for key, value in state.items()}, weights)
        arguments = ["--weights", weights, "--out-dir", out_dir, "--device", "cpu"]
        code, errors = run_tool("demo", images, CONFIG, *arguments)
        paths = sorted(images.glob("[!.]*"))
        predictions = [out_dir / f"preds/{path.stem}.json" for path in paths]
        expected = [*predictions, *(out_dir / f"vis/{path.name}" for path in paths)]
        assert sorted(out_dir.rglob("*.*")) == ([] if code else expected)
        return code, errors, [json.loads(path.read_text()) for path in predictions if not code]

    return demo


def test_weights_under_another_prefix_are_loaded_and_others_refused(demo):
    code, errors, _ = demo("student.")
    assert code == 2 and "file.pth" in errors
    (_, _, plain), (_, _, compiled) = demo(""), demo("_orig_mod.")
    assert plain == compiled and all(each["scores"] and each["masks"] for each in plain)


def test_pictures_do_not_replace_the_originals(tmp_path, run_tool):
    generate_shapes(tmp_path / "shapes", num_train=1, num_val=1, size=96)
    images = (tmp_path / "shapes/val2017").rename(tmp_path / "vis")
    before = {path: path.read_bytes() for path in images.iterdir()}
    code, errors = run_tool("demo", images, "--out-dir", tmp_path, "--device", "cpu")
    assert code == 2 and str(images) in errors
    assert before == {path: path.read_bytes() for path in images.iterdir()}


def test_without_a_config_it_finds_blood_cells(tmp_path, run_tool):
    code, _ = run_tool("demo", "--out-dir", tmp_path, "--device", "cpu")
    found = json.loads((tmp_path / "preds/image.json").read_text())
    pairs = zip(found["labels"], found["scores"], strict=True)
    sure = [label for label, score in pairs if score > 0.5]
    assert code == 0 and (tmp_path / "vis/image.jpg").is_file()
    assert (sure.count(1), sure.count(2)) == (1, 1) and sure.count(0) > 5  # of 11 red cells


def test_images_that_cannot_be_used_are_named(tmp_path, run_tool):
    (tmp_path / "one.jpg").write_bytes(b"\xff\xd8\xff\xe0 of a JPEG")
    code, errors = run_tool("demo", tmp_path, CONFIG, "--weights", "none.pth")
    assert code == 2 and "one.jpg" in errors
    (tmp_path / "one.png").touch()
    code, errors = run_tool("demo", tmp_path, CONFIG, "--weights", "none.pth")
    assert code == 2 and "two images share preds/one.json" in errors
