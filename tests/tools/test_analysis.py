"""The commands that draw what models see and count what they compute, as documented."""

import csv
import re
from collections import defaultdict

import cv2
import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample

from mrla_mm import cli
from mrla_mm.analysis.cams import Target
from mrla_mm.config import read_config
from mrla_mm.inference import build_model

from ..conftest import load_tool

DETECTOR = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"
BASE = "model.backbone.layer_attention.type=MRLABase"


def save_model(path, options, **meta):
    torch.manual_seed(0)
    model = build_model(read_config(DETECTOR, options))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "detector.pth", {})
    save_model(folder / "digits.pth", {}, dataset_meta=dict(classes=tuple("12345")))
    save_model(folder / "base.pth", {"model.backbone.layer_attention.type": "MRLABase"})
    return folder


@pytest.fixture
def images(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for name in ("a.jpg", "a.png"):
        cv2.imwrite(str(folder / name), rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    return folder


def check_picture(path):
    picture = cv2.imread(str(path))
    assert min(picture.shape[:2]) > 100 and picture.std() > 10


def test_layer_attention(run_tool, models, images, tmp_path):
    arguments = [models / "base.pth", images, "--out-dir", tmp_path / "out", "--cfg-options", BASE]
    code, err = run_tool("visualize_layer_attention", DETECTOR, *arguments)
    assert code == 0, err
    pictures = ["overview.png", *(f"stage{number}.png" for number in (1, 2, 3))]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*pictures, "scores.csv"}
    for name in pictures:
        check_picture(tmp_path / "out" / name)
    sums = defaultdict(float)
    for row in csv.DictReader((tmp_path / "out/scores.csv").open()):
        sums[row["stage"], row["head"], row["layer"]] += float(row["weight"])
    assert len(sums) == (2 + 4 + 8) * 2
    assert list(sums.values()) == pytest.approx([1] * len(sums), abs=1e-4)


def test_query_similarity(run_tool, models, images, tmp_path):
    first = [DETECTOR, models / "base.pth", images, "--cfg-options", BASE]
    more = ["--compare", DETECTOR, models / "detector.pth", "--out-dir", tmp_path / "out"]
    code, err = run_tool("visualize_query_similarity", *first, *more)
    assert code == 0, err
    check_picture(tmp_path / "out/histograms.png")
    rows = list(csv.DictReader((tmp_path / "out/similarities.csv").open()))
    assert {row["model"].split(", ")[1] for row in rows} == {"base", "detector"}
    assert {row["images"] for row in rows} == {"2"} and len(rows) == 2 * (2 + 4 + 8)
    assert all(0 <= float(row["min"]) < float(row["mean"]) < float(row["max"]) <= 1 for row in rows)


def test_class_activation_maps(run_tool, models, images, tmp_path):
    weak = ["--cfg-options", "model.test_cfg.rcnn.score_thr=0.0"]  # random weights score low
    arguments = [DETECTOR, models / "detector.pth", images, "--out-dir", tmp_path / "out", *weak]
    compare = ["--compare", DETECTOR, models / "detector.pth"]
    few = ["--layers", "layer3", "--max-channels", 2]
    code, err = run_tool("visualize_cam", *arguments, *compare, *few)
    assert code == 0, err
    check_picture(tmp_path / "out/a.png.png")
    code, err = run_tool("visualize_cam", *arguments, *few, "--format", "svg", "--max-images", 1)
    assert code == 0 and "<svg" in (tmp_path / "out/a.svg").read_text()
    arguments[1] = models / "digits.pth"  # a class "1" is not the other model's class 1
    wrong = {"no class": [*few, *compare], "unicorn": ["--class", "unicorn"], "layer4": []}
    for word, options in wrong.items():  # the quick start's model has no layer4
        code, err = run_tool("visualize_cam", *arguments, *options)
        assert code == 2 and word in err


def test_a_box_to_compare_is_scaled_as_each_image_was_before_it_was_padded():
    seen, other = (DetDataSample(metainfo=dict(scale_factor=by)) for by in ((1, 2), (3, 2)))
    target = Target(0, torch.tensor([1.0, 2, 3, 4]))
    found = load_tool("visualize_cam").scaled(target, seen, other)
    assert found.box.tolist() == [3, 2, 9, 4]


def flops(capsys, *argv):
    capsys.readouterr()
    assert cli.run(load_tool("get_flops").main, list(argv)) == 0
    written = capsys.readouterr()
    assert "warning" not in written.err
    rows = re.findall(r"^ *([-+\d,]*) +([-+.\d]+) G  (.+)$", written.out, re.MULTILINE)
    figures = {}
    for count, operations, name in rows:
        figures[name] = int((count or "0").replace(",", "")), float(operations)
    return figures


def test_a_detector_and_a_second_one(capsys):
    assert flops(capsys, DETECTOR, "--cfg-options", "default_scope=None") == flops(capsys, DETECTOR)
    one = flops(capsys, DETECTOR, "--shape", "64", "96")
    assert one["roi_head.mask_head"][1] > 0 and one["depthwise convolutions"][1] > 0
    first, second = (f"mrla_mm::imagenet/resnet50{name}_8xb32.py" for name in ("", "_mrla_light"))
    added = flops(capsys, first, "--compare", second, "--max-depth", "1")
    assert added["total"][0] == added["backbone"][0] == 25_738_452 - 25_557_032
    assert added["depthwise convolutions"][1] > 0
    assert "head" not in added, "only what differs is shown"
