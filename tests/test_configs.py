"""Every config builds, has the paper's settings, and has the paper's number of parameters."""

import csv
import math
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torchvision
import yaml
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm import backbones
from mrla_mm.necks import SimpleFeaturePyramid

from .backbones.common import PARAMETERS, branches, count
from .conftest import ROOT

CONFIGS = ROOT / "configs"
FILES = {
    path.relative_to(CONFIGS).with_suffix("").as_posix(): path
    for path in sorted(CONFIGS.rglob("*.py"))
}
NAMES = [name for name in FILES if not name.startswith("_base_")]
FOLDERS = ("", "transformers", "efficientnet")
DETECTORS = [name for name in NAMES if name.rpartition("/")[0] in FOLDERS]
ANYWHERE = [name for name in NAMES if name.startswith("anywhere/")]
QUICKSTARTS = [name for name in NAMES if name.startswith("quickstart/")]
COMPARED = re.compile(
    r"(comparators/.*_r50|imagenet/resnet50)_"
    r"(se|cbam|a2|aa|nl|gc_\w+?|eca|dia|rla_g|ba|dla_light|kcla)(_coslr_lbs)?_(1x|8xb32)"
)
RECIPES = [name for name in NAMES if name.startswith("imagenet/")]
CLASSIFIERS = [name for name in RECIPES if not COMPARED.fullmatch(name)]


def read_table(name):
    """Config, options, and our millions of parameters, by row of docs/tables."""
    lines = (ROOT / "docs/tables" / name).read_text().splitlines()
    return [(row[2], row[3], row[5]) for row in csv.reader(lines)][1:]


# Trainable parameters in millions, without the frozen stem and first stage.
MILLIONS = {}
for config, _, ours in read_table("coco.csv"):
    if config in DETECTORS:
        MILLIONS[config] = float(ours)
# By family: the backbone, channels of a head, and how many blocks have attention, by size.
FAMILIES = {
    "r": ("MRLAResNet", 32, {50: 16, 101: 33, 152: 50}),
    "deit": ("MRLAViT", 16, dict.fromkeys("tsb", 12)),
    "ceit": ("MRLACeiT", 16, dict.fromkeys("ts", 12)),
    "pvtv2": ("MRLAPVTv2", 16, dict.fromkeys(("b0", "b1"), 8)),
    "efficientnet": ("MRLAEfficientNet", 8, {"b0": 9, "b1": 16}),
}
SIZES = {"t": "tiny", "s": "small", "b": "base"}
VARIANTS = {"mrla_light": "MRLALight", "mrla_base": "MRLABase", "mla": "MLA", None: None}
PATTERN = re.compile(
    r"(?:transformers/|efficientnet/)?"
    r"(?:(retinanet|faster_rcnn|mask_rcnn|imagenet/)_?)(r|deit|ceit|pvtv2|efficientnet)"
    r"(?:esnet)?_?(\d+|b[01]|[tsb])[a-z]*"
    r"(?:_(mrla_light|mrla_base|mla))?(?:_coslr_lbs)?_(?:1x|8xb\d+)"
)


METAFILES = yaml.safe_load((ROOT / "model-index.yml").read_text())["Import"]
ENTRIES = {
    model["Config"].removeprefix("configs/").removesuffix(".py"): model
    for metafile in METAFILES
    for model in yaml.safe_load((ROOT / metafile).read_text())["Models"]
}


def parse(name):
    match = PATTERN.fullmatch(name)
    assert match, f"{name}: name the config like the others"
    size = int(match[3]) if match[3].isdigit() else match[3]
    return SimpleNamespace(host=match[1], family=match[2], size=size, variant=VARIANTS[match[4]])


def load(name):
    return Config.fromfile(FILES[name])


def build(cfg):
    init_default_scope(cfg.default_scope)
    linspace = partial(torch.linspace, device="cpu")  # by which hosts read drop path rates
    with torch.device("meta"), patch.object(torch, "linspace", linspace):
        return MODELS.build(cfg.model)


def check_attention(backbone, said, drop_path):
    ours, head_channels, blocks = FAMILIES[said.family]
    found = branches(backbone)
    if said.variant is None:
        assert not found
        return
    assert type(backbone) is getattr(backbones, ours)
    assert len(found) == blocks[said.size]
    for branch in found:
        assert type(branch.attention).__name__ == said.variant
        assert branch.attention.channels // branch.attention.heads == head_channels
    assert getattr(found[-1].drop_path, "drop_prob", 0) == pytest.approx(drop_path)


def check_hooks(cfg):
    assert cfg.default_hooks.checkpoint.type == "AtomicCheckpointHook"
    hooks = {hook.type for hook in cfg.custom_hooks}
    assert {"DatasetCheckHook", "CheckpointCheckHook"} <= hooks


def check_schedule(cfg, epochs, batch):
    check_hooks(cfg)
    assert cfg.train_cfg.max_epochs == epochs
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=batch)


def steps_of(loader):
    return {step.type: step for step in loader.dataset.pipeline}


def own(part):
    return {key: value for key, value in part.items() if key != "_scope_"}


def check_parameters(name, model):
    assert count(model) == ENTRIES[name]["Metadata"]["Parameters"]


def test_every_config_is_listed_for_the_package_manager():
    assert sorted(ENTRIES) == sorted(NAMES)


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_quickstart(name):
    cfg = load(name)
    check_hooks(cfg)
    model = build(cfg)
    check_parameters(name, model)
    assert cfg.model.backbone.get("init_cfg") is None
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ANYWHERE)
def test_detector_with_a_backbone_of_its_own(name):
    cfg = load(name)
    check_hooks(cfg)
    model = build(cfg)
    check_parameters(name, model)
    assert len(branches(model.backbone)) in (4, 12)


@pytest.mark.parametrize("name", DETECTORS)
def test_detector(name):
    """1x schedule on COCO (App. B.3): SGD for ResNet and EfficientNet, AdamW for transformers."""
    cfg, said = load(name), parse(name)
    check_schedule(cfg, epochs=12, batch=16)
    assert cfg.param_scheduler[-1].milestones == [8, 11]
    assert steps_of(cfg.train_dataloader)["Resize"].scale == (1333, 800)
    optimizer = cfg.optim_wrapper.optimizer
    if said.family in ("r", "efficientnet"):
        lr = 0.01 if said.host == "retinanet" else 0.02
        assert own(optimizer) == dict(type="SGD", lr=lr, momentum=0.9, weight_decay=1e-4)
    else:
        decay = 1e-4 if said.family == "pvtv2" else 0.05
        assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ("AdamW", 1e-4, decay)
        assert "momentum" not in optimizer
    model = build(cfg)
    check_parameters(name, model)
    transformer = said.family in ("deit", "ceit")
    drop_path = 0.1 if transformer or said.family == "pvtv2" else 0
    check_attention(model.backbone, said, drop_path)
    if name in MILLIONS:
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        assert trainable == pytest.approx(MILLIONS[name], abs=0.00006)
    if transformer:
        assert cfg.optim_wrapper.constructor == "LayerDecayOptimWrapperConstructor"
        assert type(model.neck) is SimpleFeaturePyramid
    check_checkpoint(model.backbone.init_cfg, said)
    model.eval()
    levels = model.neck(model.backbone(torch.empty(1, 3, 128, 256, device="meta")))
    head = model.bbox_head if said.host == "retinanet" else model.rpn_head
    strides = [stride for stride, _ in head.prior_generator.strides]
    grids = [(max(128 // stride, 1), max(256 // stride, 2)) for stride in strides]
    assert [tuple(level.shape[2:]) for level in levels] == grids


def check_checkpoint(init_cfg, said):
    assert init_cfg["type"] == "Pretrained"
    checkpoint = init_cfg["checkpoint"]
    if said.family == "r":
        assert checkpoint == f"torchvision://resnet{said.size}"
    elif said.family == "efficientnet":
        assert checkpoint == f"torchvision://efficientnet_{said.size}.imagenet1k_v1"
        name = f"EfficientNet_{said.size.upper()}_Weights.IMAGENET1K_V1"
        assert torchvision.models.get_weight(name)
    else:
        assert SIZES.get(said.size, said.size) in checkpoint
        if checkpoint.startswith("work_dirs/"):
            recipe = checkpoint.split("/")[1]
            assert f"imagenet/{recipe}" in CLASSIFIERS
            assert ("mrla" in recipe) == (said.variant is not None)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_imagenet_recipe(name):
    """Appendix B.1, by family; nothing starts as an identity, nothing is frozen."""
    cfg, said = load(name), parse(name)
    model = build(cfg)
    size = f"{said.family}-{SIZES[said.size]}" if said.size in SIZES else said.size
    _, plain, light, base = PARAMETERS[FAMILIES[said.family][0].removeprefix("MRLA"), size]
    check_parameters(name, model)
    # MLA has as many as base.
    assert count(model) == {None: plain, "MRLALight": light}.get(said.variant, base)
    assert all(p.requires_grad for p in model.parameters())
    check_attention(model.backbone, said, dict(r=0.2, efficientnet=0).get(said.family, 0.1))
    recipes = dict(r=resnet_recipe, efficientnet=efficientnet_recipe)
    recipes.get(said.family, transformer_recipe)(cfg, name, model)


def resnet_recipe(cfg, name, model):
    check_schedule(cfg, epochs=100, batch=256)
    optimizer = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=1e-4)
    assert own(cfg.optim_wrapper.optimizer) == optimizer
    steps = ["LoadImageFromFile", "RandomResizedCrop", "RandomFlip", "PackInputs"]
    assert list(steps_of(cfg.train_dataloader)) == steps
    cosine = "coslr" in name
    decay = dict(type="MultiStepLR", by_epoch=True, milestones=[30, 60, 90], gamma=0.1)
    if cosine:
        decay = dict(type="CosineAnnealingLR", T_max=100, by_epoch=True, begin=0, end=100)
    assert own(cfg.param_scheduler) == decay
    assert cfg.model.head.loss.type == ("LabelSmoothLoss" if cosine else "CrossEntropyLoss")
    assert model.backbone.norm_eval is False
    assert not cfg.model.backbone.get("zero_init_attention", False)


def transformer_recipe(cfg, name, model):
    check_schedule(cfg, epochs=300, batch=1024)
    assert cfg.train_dataloader.batch_size * 8 == 1024
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.weight_decay) == ("AdamW", 0.05)
    assert optimizer.lr == pytest.approx(1e-3)
    warm_up, decay = cfg.param_scheduler
    assert (warm_up.end, decay.type, decay.begin, decay.end) == (5, "CosineAnnealingLR", 5, 300)
    assert cfg.train_dataloader.sampler == dict(type="RepeatAugSampler", num_repeats=3)
    steps = steps_of(cfg.train_dataloader)
    assert "RandAugment" in steps and steps["RandomErasing"].erase_prob == 0.25
    mixes = [dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]
    assert cfg.model.train_cfg.augments == mixes
    loss = dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original")
    assert cfg.model.head.loss == loss
    head = MODELS.build(cfg.model.head)
    head.init_weights()
    weight = next(p for p in head.parameters() if p.ndim == 2)
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)  # mmpretrain's starts at 0
    assert cfg.model.backbone.drop_path_rate == 0.1
    assert not cfg.model.backbone.get("zero_init_attention", False)


def efficientnet_recipe(cfg, name, model):
    check_schedule(cfg, epochs=350, batch=768)
    assert cfg.train_dataloader.batch_size * 8 == 768
    optimizer = dict(type="TimmRMSpropTF", lr=0.048, alpha=0.9, momentum=0.9, eps=1e-3)
    assert cfg.optim_wrapper.optimizer == dict(optimizer, weight_decay=4e-5)
    warm_up, decay = cfg.param_scheduler
    assert (warm_up.type, warm_up.end, decay.gamma) == ("LinearLR", 5, 0.97)
    for epoch in range(350):
        passed = sum(milestone <= epoch for milestone in decay.milestones)
        assert passed == math.floor(epoch / 2.4 + 1e-9)
    assert cfg.model.backbone.drop_path_rate == 0.2 and cfg.model.neck.drop_rate == 0.2
    norms = [each for each in model.backbone.modules() if isinstance(each, torch.nn.BatchNorm2d)]
    assert {(norm.momentum, norm.eps) for norm in norms} == {(0.01, 1e-5)}
    assert cfg.model.backbone.conv_cfg.type == "Conv2d"  # with this eps, as in the detectors
    pixels, steps = (240 if "b1" in name else 224), steps_of(cfg.train_dataloader)
    assert steps["RandomResizedCrop"].scale == pixels
    assert steps["AutoAugment"].policies == "imagenet"
    for loader in (cfg.val_dataloader, cfg.test_dataloader):
        resize, crop = steps_of(loader)["ResizeEdge"], steps_of(loader)["CenterCrop"]
        assert (resize.scale, crop.crop_size) == (pixels + 32, pixels)
        assert resize.interpolation == steps["RandomResizedCrop"].interpolation == "bicubic"
