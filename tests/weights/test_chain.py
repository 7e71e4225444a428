"""As documented: pre-train on class folders, evaluate, convert, and train a detector from it."""

import json

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
    """Shrink the recipe to seconds: three classes, images of 48 pixels, a narrow ResNet-18."""
    options = [
        f"data_root={root}",
        *NARROW,
        "model.head.in_channels=128",
        "model.head.num_classes=3",
    ]
    options += ["model.head.topk=1", "train_cfg.max_epochs=1", "default_hooks.logger.interval=1"]
    options.append("train_dataloader.dataset.pipeline.1.scale=48")
    for phase in ("train", "val", "test"):
        options.append(f"{phase}_dataloader.dataset.metainfo.classes=(bird,cat,dog)")
        loader = ("batch_size=8", "num_workers=0", "persistent_workers=False")
        options += [f"{phase}_dataloader.{option}" for option in loader]
    for phase in ("val", "test"):
        options += [
            f"{phase}_dataloader.dataset.pipeline.{key}" for key in ("1.scale=56", "2.crop_size=48")
        ]
        options.append(f"{phase}_evaluator.topk=1")
    return options


def test_pretrain_convert_detect(coco_root, tmp_path, run_tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_class_folders(tmp_path / "pets")
    code, errors = run_tool(
        "train", RECIPE, "--work-dir", "pre", "--cfg-options", *recipe_options(root)
    )
    assert code == 0, errors
    losses = [line["loss"] for line in scalars(tmp_path / "pre") if "loss" in line]
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    trained = scalars(tmp_path / "pre")[-1]["accuracy/top1"]

    test = [
        "pre/epoch_1.pth",
        "--work-dir",
        "test",
        "--out",
        "p.pkl",
        "--cfg-options",
        *recipe_options(root),
    ]
    code, errors = run_tool("test", RECIPE, *test)
    assert code == 0, errors
    (logged,) = (tmp_path / "test").glob("2*/2*.json")
    assert json.loads(logged.read_text())["accuracy/top1"] == trained

    recipe = (
        f"pre/{RECIPE.name}"  # the config as it ran, which mmengine keeps beside the checkpoints
    )
    code, errors = run_tool(
        "convert_weights", "pre/epoch_1.pth", recipe, "--out-dir", "out", "--name", "mine"
    )
    assert code == 0, errors
    (converted,) = (tmp_path / "out").glob("mine-*.pth")

    options = [
        *tiny_options("retinanet", coco_root),
        *NARROW,
        "model.neck.in_channels=[16,32,64,128]",
    ]
    options += [
        "train_cfg.max_epochs=1",
        "train_dataloader.dataset.indices=2",
        "val_dataloader.dataset.indices=1",
    ]
    options = [option for option in options if not option.startswith("model.backbone.init_cfg")]
    # One step of zero length leaves the weights that the run started from.
    options += [f"model.backbone.init_cfg.checkpoint={converted}", "optim_wrapper.optimizer.lr=0.0"]
    code, errors = run_tool("train", DETECTOR, "--work-dir", "det", "--cfg-options", *options)
    assert code == 0, errors
    classifier = read_checkpoint("pre/epoch_1.pth")["state_dict"]
    detector = read_checkpoint("det/epoch_1.pth")["state_dict"]
    backbone = [key for key in classifier if key.startswith("backbone.")]
    assert len(backbone) == len([key for key in detector if key.startswith("backbone.")]) == 192
    assert all(torch.equal(classifier[key], detector[key]) for key in backbone)
    assert any("mrla" in key and detector[key].any() for key in backbone)
    log = next((tmp_path / "det").glob("2*/2*.log")).read_text()
    assert f"MRLAResNet loads {converted}" in log and "matched                   192" in log
