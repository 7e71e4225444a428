"""Comparisons: shared initial weights, a broken config, and a run that is killed and resumed."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mrla_mm.config import read_config
from mrla_mm.inference import build_model

from ..conftest import ROOT, load_tool, tiny_options

LIGHT = "mrla_mm::quickstart/faster_rcnn_r50_quarter_mrla_light.py"


@pytest.fixture
def configs(tmp_path):
    for name, part in {"stem": "backbone=dict(stem_channels=8)", "broken": "neck=None"}.items():
        (tmp_path / f"{name}.py").write_text(f"_base_ = '{LIGHT}'\nmodel = dict({part})")
    return [LIGHT, *(str(tmp_path / f"{name}.py") for name in ("stem", "broken"))]


def test_what_both_models_draw_at_random_starts_the_same(configs):
    compare = load_tool("compare")
    first, second = (read_config(config, {}) for config in configs[:2])
    second.update(compare=dict(weights_shared_with=configs[0]), resume=False)
    runner = SimpleNamespace(cfg=second, model=build_model(second), seed=3)
    compare.ComparedRunHook(None).before_run(runner)
    runner.model.init_weights()
    found, (drawn, keys) = runner.model.state_dict(), compare.initial_weights(first, 3)
    others = [key for key in keys if not found[key].equal(drawn[key])]
    assert others and all(found[key].shape != drawn[key].shape for key in others)


def test_a_run_without_the_metric_is_a_fault_beside_the_others(tmp_path):
    compare = load_tool("compare")
    folders = [tmp_path / name / "seed_0" for name in ("plain", "light")]
    for folder, metric in zip(folders, ("AP", "AP50"), strict=True):
        folder.mkdir(parents=True)
        result = {"config": folder.parent.name, "seed": 0, metric: 0.5}
        (folder / "result.json").write_text(json.dumps(result | dict.fromkeys(compare.COSTS, 1)))
    args, faults = SimpleNamespace(metric=None, out=tmp_path, configs=["plain", "light"]), {}
    table = compare.write_results(args, folders, faults)
    assert "| plain | 1 | 0.5 |" in table and "light from seed 0 returns no AP" in table and faults


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_figures(configs, coco_root, tmp_path):
    tiny = ["--cfg-options", *tiny_options("rcnn", coco_root, "train_cfg.max_epochs=2")]

    def start(out, *configs):
        command = [sys.executable, ROOT / "tools/compare.py", *configs, "--out", tmp_path / out]
        command += ["--metric", "coco/AR@100", "--seeds", out, "--jobs", "2", *tiny]
        return subprocess.Popen(command, env=dict(os.environ, PYTHONPATH=str(ROOT)))

    killed = start("2", *configs)
    while not (tmp_path / "2/stem/seed_0/last_checkpoint").is_file():
        time.sleep(0.1)
    killed.kill()
    assert start("2", *configs).wait() == 1 and start("1", *configs[:2]).wait() == 0
    files = [tmp_path / n / "stem/seed_0/result.json" for n in "21"]
    resumed, whole = (json.loads(file.read_text()) for file in files)
    assert all(resumed[key] == whole[key] for key in whole if key.startswith("coco/"))
    table = (tmp_path / "2/table.md").read_text()
    assert "| stem | 2 |" in table and "| broken | 0 |" in table and "seed_1 fails" in table
