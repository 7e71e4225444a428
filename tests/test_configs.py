"""Every config builds, says what the paper says, and has the paper's number of parameters."""

import re
from pathlib import Path

import pytest
import torch
from mmcv.cnn.bricks import DropPath
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.backbones import MRLAResNet

CONFIGS = Path(__file__).parents[1] / "configs"
DETECTORS = ("retinanet", "faster_rcnn", "mask_rcnn")
SCHEDULE_1X = [
    *(f"{detector}_{depth}_1x" for detector in DETECTORS for depth in ("r50", "r101")),
    *(f"{d}_{depth}_mrla_{v}_1x" for d in DETECTORS for depth in ("r50", "r101") for v in ("light", "base")),
    *(f"{detector}_r152_mrla_light_1x" for detector in DETECTORS),
]

# Trainable parameters in millions: Tables 2 and 3 of the paper, which leave out the frozen stem and first stage.
PAPER_MILLIONS = {
    "retinanet_r50_1x": 37.74,
    "retinanet_r50_mrla_base_1x": 37.92,
    "retinanet_r50_mrla_light_1x": 37.92,
    "retinanet_r101_1x": 56.74,
    "retinanet_r101_mrla_light_1x": 57.12,
    "faster_rcnn_r50_1x": 41.53,
    "faster_rcnn_r50_mrla_base_1x": 41.70,
    "faster_rcnn_r50_mrla_light_1x": 41.70,
    "faster_rcnn_r101_1x": 60.52,
    "faster_rcnn_r101_mrla_light_1x": 60.90,
    "mask_rcnn_r50_1x": 44.18,
    "mask_rcnn_r50_mrla_base_1x": 44.34,
    "mask_rcnn_r50_mrla_light_1x": 44.34,
    "mask_rcnn_r101_1x": 63.17,
    "mask_rcnn_r101_mrla_light_1x": 63.54,
}


def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f"{name}.py")


def build(cfg: Config):
    from mmdet.registry import MODELS

    init_default_scope("mmdet")
    with torch.device("meta"):  # shapes are all that matters here
        return MODELS.build(cfg.model)


def test_the_list_is_complete():
    assert {path.stem for path in CONFIGS.glob("*_r[0-9]*_1x.py")} == set(SCHEDULE_1X)


@pytest.mark.parametrize("name", SCHEDULE_1X)
def test_config_builds_with_the_papers_settings_and_parameters(name):
    cfg = load(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.momentum, optimizer.weight_decay) == ("SGD", 0.9, 1e-4)
    assert optimizer.lr == (0.01 if name.startswith("retinanet") else 0.02)
    assert cfg.train_cfg.max_epochs == 12
    assert cfg.param_scheduler[-1].milestones == [8, 11]
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=16)
    assert [step.scale for step in cfg.train_dataloader.dataset.pipeline if step.type == "Resize"] == [(1333, 800)]
    assert cfg.custom_imports.imports == ["mrla_mm"]

    model = build(cfg)
    depth = int(re.search(r"_r(\d+)_", name)[1])
    assert model.backbone.depth == depth
    assert model.backbone.init_cfg["checkpoint"] == f"torchvision://resnet{depth}"
    branches = [m for m in model.modules() if isinstance(m, LayerAttentionResidual)]
    if "mrla" not in name:
        assert not branches
    else:
        assert isinstance(model.backbone, MRLAResNet)
        variant = "MRLALight" if "light" in name else "MRLABase"
        assert {type(b.attention).__name__ for b in branches} == {variant}
        assert {b.attention.channels // b.attention.heads for b in branches} == {32}
        assert len(branches) == sum(model.backbone.stage_blocks)
        assert model.backbone.attention_drop_path == 0
    if name in PAPER_MILLIONS:
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        assert trainable == pytest.approx(PAPER_MILLIONS[name], abs=0.02)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.py")), ids=lambda p: p.relative_to(CONFIGS).as_posix())
def test_configs_are_thin(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def roots():
    """Configs that do not inherit from one beside them, which has its checkpoint hook from there."""
    for path in sorted(set(CONFIGS.rglob("*.py")) - set(CONFIGS.glob("_base_/*"))):
        if not path.read_text(encoding="utf-8").count('_base_ = "./'):
            yield path


@pytest.mark.parametrize("path", roots(), ids=lambda p: p.stem)
def test_checkpoints_are_atomic(path):
    assert Config.fromfile(path).default_hooks.checkpoint.type == "AtomicCheckpointHook"


def test_heads_of_16_channels_as_the_published_base_weights_have():
    cfg = load("retinanet_r50_mrla_base_1x")
    cfg.merge_from_dict({"model.backbone.layer_attention.head_channels": 16})
    assert build(cfg).backbone.layer1[0].mrla.attention.heads == 16


RESNET_RECIPES = {
    "resnet50_8xb32": (50, None, 25_557_032),
    "resnet50_mla_8xb32": (50, "MLA", 25_723_348),
    "resnet50_mrla_light_coslr_lbs_8xb32": (50, "MRLALight", 25_738_452),
    "resnet50_mrla_light_8xb32": (50, "MRLALight", 25_738_452),
    "resnet50_mrla_base_8xb32": (50, "MRLABase", 25_723_348),
    "resnet101_mrla_light_8xb32": (101, "MRLALight", 44_939_646),
    "resnet101_mrla_base_8xb32": (101, "MRLABase", None),
    "resnet152_mrla_light_8xb32": (152, "MRLALight", 60_767_784),
    "resnet152_mrla_base_8xb32": (152, "MRLABase", None),
}


def own(part: dict) -> dict:
    """A part of a config without the scope that mmengine notes in what comes from another package."""
    return {key: value for key, value in part.items() if key != "_scope_"}


def test_the_list_of_resnet_recipes_is_complete():
    assert {path.stem for path in (CONFIGS / "imagenet").glob("resnet*.py")} == set(RESNET_RECIPES)


@pytest.mark.parametrize("name", RESNET_RECIPES)
def test_resnet_recipe_is_the_papers(name):
    """Appendix B.1: 100 epochs of SGD from 0.1 on 256 images, decay 1e-4, steps of 30; only layer attention dropped."""
    from mmpretrain.registry import MODELS

    depth, variant, parameters = RESNET_RECIPES[name]
    cfg = load(f"imagenet/{name}")
    assert own(cfg.optim_wrapper.optimizer) == dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=1e-4)
    assert cfg.train_cfg.max_epochs == 100 and cfg.train_dataloader.batch_size == 32
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=256)
    kinds = [step.type for step in cfg.train_dataloader.dataset.pipeline]
    assert kinds == ["LoadImageFromFile", "RandomResizedCrop", "RandomFlip", "PackInputs"]
    cosine = "coslr" in name
    if cosine:
        assert own(cfg.param_scheduler) == dict(type="CosineAnnealingLR", T_max=100, by_epoch=True, begin=0, end=100)
    else:
        assert own(cfg.param_scheduler) == dict(type="MultiStepLR", by_epoch=True, milestones=[30, 60, 90], gamma=0.1)
    assert cfg.model.head.loss.type == ("LabelSmoothLoss" if cosine else "CrossEntropyLoss")
    init_default_scope("mmpretrain")
    with torch.device("cpu" if variant is None else "meta"):
        model = MODELS.build(cfg.model).train()
    assert parameters is None or sum(p.numel() for p in model.parameters()) == parameters
    branches = [m for m in model.modules() if isinstance(m, LayerAttentionResidual)]
    drops = {m.drop_prob for m in model.modules() if isinstance(m, DropPath) and m.drop_prob}
    if variant is None:
        assert not branches and not drops
        return
    assert model.backbone.depth == depth and {type(b.attention).__name__ for b in branches} == {variant}
    assert all(b.drop_path.drop_prob == 0.2 for b in branches) and drops == {0.2}
    assert len([m for m in model.modules() if isinstance(m, DropPath) and m.drop_prob]) == len(branches)
    assert {b.attention.channels // b.attention.heads for b in branches} == {32}
    assert all(p.requires_grad for p in model.parameters()) and all(
        m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d)
    )
