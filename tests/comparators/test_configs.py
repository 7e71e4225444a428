"""The configs of the comparators: the recipes of the MRLA configs, and the paper's numbers of parameters."""

import pytest

from ..backbones.common import count
from ..test_configs import COMPARED, FILES, build, check_schedule, load, resnet_recipe, steps_of

NAMES = {
    COMPARED.fullmatch(name)[2]: name for name in FILES if name.startswith("imagenet/") and COMPARED.fullmatch(name)
}
# Millions of parameters of ResNet-50, -101 and -152 with the classifier. SE, CBAM, ECA, DIA, RLA_g and BA: Tables 1 and
# 6 of the paper, where they have the row. AA and A2: the tables of their own papers; ours has 27.1 and 47.6 for AA and
# 34.6 for A2. NL and GC: counted on a plain ResNet; the paper quotes others (29.0; 26.9 and 29.4).
MILLIONS = {
    "se": (28.1, 49.3, 66.8),
    "cbam": (28.1, 49.3, 66.8),
    "eca": (25.6, 44.5, 60.2),
    "dia": (28.4, 47.4, 63.0),
    "rla_g": (25.9, 45.0, 60.8),
    "ba": (28.7, 50.5, 68.4),
    "aa": (25.8, 45.4, 61.7),
    "a2": (32.9, 51.9, 67.5),
    "nl": (27.7, 46.6, 62.3),
    "gc_1": (25.7, 44.7, 60.3),
    "gc_all": (28.1, 49.3, 66.8),
}
# Tables 2 and 3. Those of GC and NL count the frozen stem and first stage too.
DETECTORS = {
    "faster_rcnn_r50_se_1x": 44.02,
    "faster_rcnn_r50_eca_1x": 41.53,
    "faster_rcnn_r50_rla_g_1x": 41.79,
    "faster_rcnn_r50_ba_1x": 44.66,
    "retinanet_r50_se_1x": 40.23,
    "retinanet_r50_eca_1x": 37.74,
    "retinanet_r50_rla_g_1x": 38.00,
    "mask_rcnn_r50_se_1x": 46.67,
    "mask_rcnn_r50_eca_1x": 44.18,
    "mask_rcnn_r50_rla_g_1x": 44.43,
    "mask_rcnn_r50_ba_1x": 47.30,
    "mask_rcnn_r50_nl_1x": 46.50,
    "mask_rcnn_r50_gc_r16_1x": 46.90,
    "mask_rcnn_r50_gc_r4_1x": 54.40,
}


def test_every_config_is_tested():
    assert NAMES.keys() == MILLIONS.keys()
    assert {name for name in FILES if name.startswith("comparators/")} == {f"comparators/{name}" for name in DETECTORS}


@pytest.mark.parametrize("kind", MILLIONS)
def test_classifier(kind):
    for depth, millions in zip((50, 101, 152), MILLIONS[kind], strict=True):
        cfg = load(NAMES[kind])
        cfg.model.backbone.depth = depth
        model = build(cfg)
        assert count(model) / 1e6 == pytest.approx(millions, abs=0.051)
        assert all(p.requires_grad for p in model.parameters())
    resnet_recipe(cfg, NAMES[kind], model)


@pytest.mark.parametrize("name", DETECTORS)
def test_detector(name):
    cfg = load(f"comparators/{name}")
    check_schedule(cfg, epochs=12, batch=16)
    assert steps_of(cfg.train_dataloader)["Resize"].scale == (1333, 800)
    assert cfg.optim_wrapper.optimizer.lr == (0.01 if "retinanet" in name else 0.02)
    assert cfg.model.backbone.init_cfg.checkpoint == "torchvision://resnet50"
    model = build(cfg)
    frozen_too = "_gc_" in name or "_nl_" in name
    counted = sum(p.numel() for p in model.parameters() if frozen_too or p.requires_grad)
    assert counted / 1e6 == pytest.approx(DETECTORS[name], abs=0.02)
