"""As documented: pre-train on class folders, evaluate, convert, and train a detector from it."""

import pytest
import torch

from mrla_mm.weights import read_checkpoint

from ..conftest import ROOT, tiny_options, write_class_folders
from ..test_smoke import scalars

pytestmark = pytest.mark.slow
RECIPE = ROOT / "configs/imagenet/resnet50_mrla_light_8xb32.py"
DETECTOR = ROOT / "configs/retinanet_r50_mrla_light_1x.py"
NARROW = [
    f"model.backbone.{option}"
    for option in ("depth=18", "base_channels=16", "layer_attention.head_channels=16")
]


def recipe_options(root):
    options = [f"data_root={root}", *NARROW, "model.head.in_channels=128"]
    options += ["model.head.num_classes=3", "model.head.topk=1", "train_cfg.max_epochs=1"]
    options += ["default_hooks.logger.interval=1", "val_evaluator.topk=1", "test_evaluator.topk=1"]
    options.append("train_dataloader.dataset.pipeline.1.scale=48")
    for loader in ("train_dataloader", "val_dataloader", "test_dataloader"):
        options += [f"{loader}.batch_size=8", f"{loader}.num_workers=0"]
        options.append(f"{loader}.persistent_workers=False")
        options.append(f"{loader}.dataset.metainfo.classes=(bird,cat,dog)")
    for loader in ("val_dataloader", "test_dataloader"):
        options.append(f"{loader}.dataset.pipeline.1.scale=56")
        options.append(f"{loader}.dataset.pipeline.2.crop_size=48")
    return options


def test_pretrain_convert_detect(coco_root, tmp_path, run_tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = recipe_options(write_class_folders(tmp_path / "pets"))

    def run(*arguments):
        code, errors = run_tool(*arguments)
        assert code == 0, errors

    run("train", RECIPE, "--work-dir", "pre", "--cfg-options", *options)
    losses = [line["loss"] for line in scalars(tmp_path / "pre") if "loss" in line]
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    run("test", RECIPE, "pre/epoch_1.pth", "--work-dir", "test", "--cfg-options", *options)

    recipe = f"pre/{RECIPE.name}"  # as it ran, which mmengine keeps beside the checkpoints
    run("convert_weights", "pre/epoch_1.pth", recipe, "--out-dir", "out", "--name", "mine")
    (converted,) = (tmp_path / "out").glob("mine-*.pth")

    options = [*tiny_options("retinanet", coco_root), *NARROW]
    options = [option for option in options if not option.startswith("model.backbone.init_cfg")]
    options += ["model.neck.in_channels=[16,32,64,128]", "train_cfg.max_epochs=1"]
    options += ["train_dataloader.dataset.indices=2", "val_dataloader.dataset.indices=1"]
    # One step of zero length leaves the weights that the run started from.
    options += [f"model.backbone.init_cfg.checkpoint={converted}", "optim_wrapper.optimizer.lr=0.0"]
    run("train", DETECTOR, "--work-dir", "det", "--cfg-options", *options)
    classifier = read_checkpoint("pre/epoch_1.pth")["state_dict"]
    detector = read_checkpoint("det/epoch_1.pth")["state_dict"]
    backbone = [key for key in classifier if key.startswith("backbone.")]
    assert len(backbone) == len([key for key in detector if key.startswith("backbone.")]) == 192
    assert all(torch.equal(classifier[key], detector[key]) for key in backbone)
    assert any("mrla" in key and detector[key].any() for key in backbone)
    log = next((tmp_path / "det").glob("2*/2*.log")).read_text()
    assert f"MRLAResNet loads {converted}" in log and "matched                   192" in log
