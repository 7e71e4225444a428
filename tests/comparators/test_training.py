"""On COCO images every comparator trains, is killed, resumes, and tests the same."""

import signal

import pytest
import torch
from mmengine.registry import HOOKS

from ..conftest import tiny_options
from ..engine.runs import At, terminate
from ..test_smoke import REAL_COCO, figures_of_test, val_figures
from .test_resnets import KINDS

HOOKS.register_module(
    name="Killed", module=lambda: At("after_train_iter", terminate, 3), force=True
)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_COCO.is_dir(), reason=f"no real COCO images at {REAL_COCO}")
@pytest.mark.parametrize("kind", KINDS)
def test_train_kill_resume_test(kind, tmp_path, run_tool):
    """Two epochs of two steps; the signal comes in the second epoch."""
    backbone = dict(type="ComparatorResNet", base_channels=16, frozen_stages=1, init_cfg=None)
    backbone |= KINDS[kind]
    model = dict(backbone=backbone, neck=dict(in_channels=[64, 128, 256, 512]))
    config = tmp_path / "config.py"
    base, hooks = "mrla_mm::faster_rcnn_r50_1x.py", [dict(type="Killed")]
    config.write_text(f"_base_ = {base!r}\nmodel = {model!r}\ncustom_hooks = {hooks!r}\n")
    options = tiny_options("faster_rcnn", REAL_COCO, "train_cfg.max_epochs=2")
    for phase, images in (("train", 4), ("val", 2), ("test", 2)):
        options.append(f"{phase}_dataloader.dataset.indices={images}")
    train = [config, "--work-dir", tmp_path / "run", "--cfg-options", *options]
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_tool("train", *train)
    assert torch.load(tmp_path / "run/interrupted.pth", weights_only=True)["meta"]["iter"] == 3
    assert run_tool("train", *train, "--resume")[0] == 0
    checkpoint = tmp_path / "run/epoch_2.pth"
    assert torch.load(checkpoint, weights_only=True)["meta"]["iter"] == 5
    test = [config, checkpoint, "--work-dir", tmp_path / "test", "--cfg-options", *options]
    assert run_tool("test", *test)[0] == 0
    assert figures_of_test(tmp_path / "test") == val_figures(tmp_path / "run")[-1]
