"""Comparators and other hosts train, are killed, resume, and test the same."""

import signal

import pytest
import torch
from mmengine.registry import HOOKS

from ..conftest import tiny_options
from ..engine.runs import At, terminate
from ..test_smoke import figures_of_test, val_figures
from .test_resnets import KINDS

HOOKS.register_module(
    name="Killed", module=lambda: At("after_train_iter", terminate, 3), force=True
)

BN = dict(norm_cfg=dict(type="BN"))
CHANNELS = [48, 96, 192, 384]
HOSTS = {  # what makes a config of ours small
    "rtmdet_s_mrla_light_300e": dict(
        backbone=dict(widen_factor=0.375, **BN),
        neck=dict(in_channels=CHANNELS[1:], out_channels=96, **BN),
        # Without exp the sides of all boxes may be negative after four iterations.
        bbox_head=dict(in_channels=96, feat_channels=96, exp_on_reg=True, **BN),
    ),
    "mask_rcnn_swin_t_mrla_light_1x": dict(
        backbone=dict(embed_dims=48), neck=dict(in_channels=CHANNELS)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DLA", "RLA", *HOSTS])
def test_train_kill_resume_test(kind, coco_root, tmp_path, run_tool):
    options = ["train_cfg.max_epochs=2", "train_cfg.val_interval=1"]
    if kind in HOSTS:
        base, model = f"mrla_mm::anywhere/{kind}.py", HOSTS[kind]
        options = tiny_options(kind, coco_root, *options)
    else:
        small = dict(base_channels=16, frozen_stages=1, init_cfg=None)
        backbone = dict(type="mrla_mm.ComparatorResNet", **small) | KINDS[kind]
        base, model = "mrla_mm::faster_rcnn_r50_1x.py", dict(backbone=backbone)
        model["neck"] = dict(in_channels=[64, 128, 256, 512])
        options = tiny_options("faster_rcnn", coco_root, *options)
    if "rtmdet" in kind:
        options = [option for option in options if "pipeline.2" not in option]
        options += ["custom_hooks.1.switch_epoch=1", "train_dataloader.batch_size=2"]
    config = tmp_path / "config.py"
    config.write_text(
        f"_base_ = {base!r}\nmodel = {model!r}\n"
        "custom_hooks = [*_base_.get('custom_hooks', []), dict(type='Killed')]\n"
        "default_hooks = dict(checkpoint=dict(type='AtomicCheckpointHook', interval=1))\n"
    )
    train = [config, "--work-dir", tmp_path / "run", "--cfg-options", *options]
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_tool("train", *train)
    assert torch.load(tmp_path / "run/interrupted.pth", weights_only=True)["meta"]["iter"] == 3
    assert run_tool("train", *train, "--resume")[0] == 0
    checkpoint = tmp_path / "run/epoch_2.pth"
    assert torch.load(checkpoint, weights_only=True)["meta"]["iter"] == 4  # none is repeated
    test = [config, checkpoint, "--work-dir", tmp_path / "test", "--cfg-options", *options]
    assert run_tool("test", *test)[0] == 0
    assert figures_of_test(tmp_path / "test") == val_figures(tmp_path / "run")[-1]
