"""Comparisons: what is planned and refused, shared weights, and a killed run that is resumed."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrla_mm.analysis import compare
from mrla_mm.analysis.compare.plan import config_file
from mrla_mm.analysis.compare.run import ComparedRunHook, initial_weights, shared_weights
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

from ..conftest import ROOT, tiny_options

LIGHT = "mrla_mm::quickstart/faster_rcnn_r50_quarter_mrla_light.py"
PARTS = {
    "stem": "model = dict(backbone=dict(stem_channels=8))",
    "broken": "model = dict(neck=None)",
    "longer": "train_cfg = dict(max_epochs=11)",
    "other_test": "test_evaluator = dict(metric='proposal')",
}


@pytest.fixture
def configs(tmp_path):
    for name, part in PARTS.items():
        (tmp_path / f"{name}.py").write_text(f"_base_ = '{LIGHT}'\n{part}")
    return [LIGHT, *(str(tmp_path / f"{name}.py") for name in PARTS)]


def plan_of(names, out):
    return compare.make_plan(names, out / "out", range(2), {})


def test_what_both_models_draw_at_random_starts_the_same(configs, tmp_path):
    plan = plan_of(configs[:2], tmp_path)
    first, second = (read_config(str(config_file(plan.out / name)), {}) for name in plan.names)
    second.resume = False
    runner = SimpleNamespace(cfg=second, model=build_model(second), seed=3)
    ComparedRunHook().before_run(runner)
    runner.model.init_weights()
    found, (drawn, keys) = runner.model.state_dict(), initial_weights(first, 3)
    others = [key for key in keys if not found[key].equal(drawn[key])]
    assert others and all(found[key].shape != drawn[key].shape for key in others)


def test_what_either_model_does_not_draw_stays_its_own(configs):
    drawn, fixed = (read_config(LIGHT, {}) for _ in range(2))
    fixed.model.rpn_head.init_cfg = dict(type="Constant", layer="Conv2d", val=0)
    key = "rpn_head.rpn_conv.weight"
    assert not shared_weights(fixed, drawn, 3)[key].any(), "the first draws it alone"
    own, _ = initial_weights(drawn, 3)
    assert torch.equal(shared_weights(drawn, fixed, 3)[key], own[key]), "the second draws it alone"


def test_an_iteration_draws_the_same_however_much_others_drew_and_after_a_resume():
    def draw(iterations, others):
        hook, drawn = ComparedRunHook(), []
        for index in iterations:
            runner = SimpleNamespace(seed=3, iter=index)
            if index % 2 == 0:
                hook.before_train_epoch(runner)
            drawn.append(torch.rand(1).item())
            torch.rand(others)
            hook.after_train_iter(runner)
        return drawn

    whole = draw(range(4), others=0)
    assert len({*whole}) == 4 and draw(range(2, 4), others=5) == whole[2:]


def test_the_plan_says_which_schedules_and_tests_differ(configs, tmp_path):
    _, stem, _, longer, other_test = configs
    plan = plan_of([LIGHT, stem, longer, other_test], tmp_path)
    keys = [remark.split(": ")[1].split()[0] for remark in plan.remarks]
    assert keys == ["train_cfg", "test_evaluator"]
    assert "longer" in plan.remarks[0] and "other_test" in plan.remarks[1]
    assert len(plan.runs()) == 8 and len(list((tmp_path / "out").glob("*/*.py"))) == 4
    plan_of(["mrla_mm::retinanet_r50_mrla_light_1x.py"], tmp_path)
    cfg = read_config(str(config_file(tmp_path / "out/retinanet_r50_mrla_light_1x")), {})
    assert cfg.model.type == "RetinaNet" and cfg.default_hooks.checkpoint.max_keep_ckpts == 1
    twins = [str(tmp_path / name) for name in ("one.py", "two.py")]
    for twin in twins:
        Path(twin).write_text("from torch.nn import Tanh\nmodel = train_cfg = dict(type=Tanh)")
    assert plan_of(twins, tmp_path).remarks == []


def test_a_config_that_cannot_be_read_ends_the_plan_before_it_writes(configs, tmp_path):
    with pytest.raises(InputError, match="missing.py"):
        plan_of(["missing.py", LIGHT], tmp_path)
    (tmp_path / "typo.py").write_text(f"_base_ = '{LIGHT}'\nmodel = dict(neck=dict(type='FPM'))")
    with pytest.raises(InputError, match="FPM"):
        plan_of([LIGHT, str(tmp_path / "typo.py")], tmp_path)
    with pytest.raises(InputError, match="two configs"):
        plan_of([LIGHT, LIGHT], tmp_path)
    assert not (tmp_path / "out").exists()


def test_runs_of_another_config_are_not_mixed_in(configs, tmp_path):
    _, stem, _, first, _ = configs
    run = plan_of([first, stem], tmp_path).runs()[1]
    run.folder.mkdir()
    (run.folder / "last_checkpoint").touch()

    def change(config, line):
        Path(config).write_text(f"{Path(config).read_text()}\n{line}")

    change(first, "train_cfg = dict(max_epochs=12)")
    plan_of([first, stem], tmp_path)
    change(first, "model = dict(backbone=dict(stem_channels=12))")
    with pytest.raises(InputError, match="stem has runs of another config.* first config"):
        plan_of([first, stem], tmp_path)
    (run.folder / "last_checkpoint").rename(run.folder / "result.json")
    change(stem, "train_cfg = dict(max_epochs=3)")
    with pytest.raises(InputError, match="stem has runs of another config"):
        plan_of([first, stem], tmp_path)


@pytest.mark.parametrize("metrics", [dict(AP50=0.5), dict(AP=math.nan, AP50=0.5)])
def test_a_run_without_the_metric_is_a_fault_beside_the_others(metrics, tmp_path):
    plan = compare.Plan(tmp_path, ["plain", "light"], range(1), ["A remark."])
    for run, found in zip(plan.runs(), (dict(AP=0.5, AP50=0.7), metrics), strict=True):
        run.folder.mkdir(parents=True)
        result = dict(config=run.config, seed=0, metrics=found, costs=dict(seconds=1.0))
        (run.folder / "result.json").write_text(json.dumps(result))
    (fault,) = compare.write_results(plan, None, [])
    table = (tmp_path / "table.md").read_text()
    assert "| plain | 1 | 0.5 |" in table and "| light | 0 |" in table and "A remark." in table
    assert fault in table and "light, seed 0: no AP in" in fault and run.is_finished()
    assert (tmp_path / "runs.csv").read_text().startswith("config,seed,AP,")
    assert (tmp_path / "differences.svg").is_file()


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_figures(configs, coco_root, tmp_path):
    tiny = ["--cfg-options", *tiny_options("rcnn", coco_root, "train_cfg.max_epochs=2")]

    def start(out, *configs, tool=(ROOT / "tools/compare.py",)):
        command = [sys.executable, *tool, *configs, "--out", tmp_path / out, "--first-seed", "7"]
        command += ["--metric", "coco/AR@100", "--seeds", out, "--jobs", "2", *tiny]
        return subprocess.Popen(command, env=dict(os.environ, PYTHONPATH=str(ROOT)), cwd=tmp_path)

    killed = start("2", *configs[:3])
    while not (tmp_path / "2/stem/seed_7/last_checkpoint").is_file():
        time.sleep(0.1)
    killed.kill()
    assert start("2", *configs[:3]).wait() == 1
    assert start("1", *configs[:2], tool=("-m", "mrla_mm", "compare")).wait() == 0
    files = [tmp_path / n / "stem/seed_7/result.json" for n in "21"]
    resumed, whole = (json.loads(file.read_text())["metrics"] for file in files)
    assert resumed == whole and "coco/AR@100" in whole
    table = (tmp_path / "2/table.md").read_text()
    assert "| stem | 2 |" in table and "| broken | 0 |" in table and "seed_8 fails" in table
