"""Comparisons: shared initial weights, a broken config, and a run that is killed and resumed."""

import csv
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from mrla_mm.config import read_config
from mrla_mm.inference import build_model

from ..conftest import ROOT, load_tool, tiny_options


@pytest.fixture
def configs(tmp_path):
    base = "_base_ = 'mrla_mm::quickstart/faster_rcnn_r50_quarter_mrla_light.py'\nmodel = "
    heads = "dict(backbone=dict(layer_attention=dict(head_channels=8)))"
    broken = "dict(roi_head=dict(bbox_head=dict(in_channels=17)))"
    for name, model in {"light": "dict()", "heads": heads, "broken": broken}.items():
        (tmp_path / f"{name}.py").write_text(base + model)
    return [str(tmp_path / f"{name}.py") for name in ("light", "heads", "broken")]


def test_initial_weights_are_shared_where_shapes_agree_and_none_is_pretrained(configs, tmp_path):
    compare = load_tool("compare")
    first, second = (read_config(path, {}) for path in configs[:2])
    file, pretrained = tmp_path / "neck.pth", build_model(second).neck.state_dict()
    torch.save(pretrained, file)
    second.model.neck.init_cfg = dict(type="Pretrained", checkpoint=str(file))
    second.update(compare=dict(weights_shared_with=configs[0]), resume=False)
    runner = SimpleNamespace(cfg=second, model=build_model(second), seed=3)
    compare.ComparedRunHook(None).before_run(runner)
    runner.model.init_weights()
    expected, _ = compare.initial_weights(first, 3)
    expected |= {f"neck.{key}": value for key, value in pretrained.items()}
    found = runner.model.state_dict()
    others = {key for key in found if not torch.equal(found[key], expected[key])}
    assert others and all(found[key].shape != expected[key].shape for key in others)


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_figures(configs, coco_root, tmp_path):
    options = tiny_options("rcnn", coco_root, "train_cfg.max_epochs=2")
    command = [sys.executable, ROOT / "tools/compare.py", *configs, "--metric", "coco/AR@100"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")

    def start(seeds):
        arguments = ["--out", tmp_path / seeds, "--seeds", seeds, "--cfg-options", *options]
        return subprocess.Popen([*command, *arguments], env=environment)

    killed = start("2")
    while not list(tmp_path.glob("2/heads/seed_0/last_checkpoint")):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    assert start("2").wait() == start("1").wait() == 1
    resumed, whole = (csv.DictReader((tmp_path / f"{n}/runs.csv").open()) for n in (2, 1))
    metrics = [[row[key] for key in row if key.startswith("coco")] for row in resumed]
    again = [[row[key] for key in row if key.startswith("coco")] for row in whole]
    assert len(metrics) == 4 and again == metrics[:2] and max(again[0]) > "0.0"
    table = (tmp_path / "2/table.md").read_text()
    assert "| heads | 2 |" in table and "| broken | 0 |" in table and "broken/seed_1 fails" in table
