"""On COCO images comparators and other hosts train, are killed, resume, and test the same."""

import json
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

BN = dict(norm_cfg=dict(type="BN"))
CHANNELS = [48, 96, 192, 384]
X50 = dict(type="WithLayerAttention", backbone="ResNeXt", depth=50, init_cfg=None)
SWIN_V2 = dict(
    _delete_=True,
    type="WithLayerAttention",
    backbone="mmpretrain.SwinTransformerV2",
    arch=dict(embed_dims=32, depths=[2] * 4, num_heads=[1] * 4, extra_norm_every_n_blocks=0),
    out_indices=(0, 1, 2, 3),
    pad_small_map=True,
)
# What makes another config small, by its name
HOSTS = {
    "mrla_mm::anywhere/rtmdet_s_mrla_light_300e.py": dict(
        backbone=dict(widen_factor=0.375, **BN),
        neck=dict(in_channels=CHANNELS[1:], out_channels=96, **BN),
        # Without exp the sides of all boxes may be negative after four iterations.
        bbox_head=dict(in_channels=96, feat_channels=96, exp_on_reg=True, **BN),
    ),
    "mrla_mm::anywhere/mask_rcnn_swin_t_mrla_light_1x.py": dict(
        backbone=dict(embed_dims=48), neck=dict(in_channels=CHANNELS)
    ),
    "mmdet::faster_rcnn/faster-rcnn_x101-32x4d_fpn_1x_coco.py": dict(backbone=X50),
    "mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py": dict(
        backbone=SWIN_V2, neck=dict(in_channels=[32, 64, 128, 256])
    ),
}


def write_first_images(path, count):
    """Write the annotations of the first validation images, and return their path."""
    content = json.loads((REAL_COCO / "annotations/instances_val2017.json").read_text())
    content["images"] = content["images"][:count]
    kept = {image["id"] for image in content["images"]}
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] in kept]
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not REAL_COCO.is_dir(), reason=f"no real COCO images at {REAL_COCO}")
@pytest.mark.parametrize("kind", [*KINDS, *HOSTS])
def test_train_kill_resume_test(kind, tmp_path, run_tool):
    backbone = dict(
        type="mrla_mm.ComparatorResNet", base_channels=16, frozen_stages=1, init_cfg=None
    )
    backbone |= KINDS.get(kind, {})
    model = dict(backbone=backbone, neck=dict(in_channels=[64, 128, 256, 512]))
    base = kind if kind in HOSTS else "mrla_mm::faster_rcnn_r50_1x.py"
    config = tmp_path / "config.py"
    config.write_text(
        f"_base_ = {base!r}\nmodel = {HOSTS.get(kind, model)!r}\n"
        "custom_hooks = [*_base_.get('custom_hooks', []), dict(type='Killed')]\n"
        "default_hooks = dict(checkpoint=dict(type='AtomicCheckpointHook', interval=1))\n"
    )
    name = kind if kind in HOSTS else "faster_rcnn"
    options = tiny_options(name, REAL_COCO, "train_cfg.max_epochs=2", "train_cfg.val_interval=1")
    if "rtmdet" in kind:
        options = [option for option in options if "pipeline.2" not in option]
        options += ["custom_hooks.1.switch_epoch=1", "train_dataloader.batch_size=2"]
    options.append("train_dataloader.dataset.indices=4")
    scored = write_first_images(tmp_path / "scored.json", 2)
    for phase in ("val", "test"):
        options.append(f"{phase}_dataloader.dataset.ann_file={scored}")
        options.append(f"{phase}_evaluator.ann_file={scored}")
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
