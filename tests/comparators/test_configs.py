"""The comparators' configs: MRLA's recipes, and the parameters in docs/tables."""

import pytest
from mmengine.registry import MODELS

from ..backbones.common import count
from ..test_configs import (
    COMPARED,
    FILES,
    build,
    check_parameters,
    check_schedule,
    load,
    read_table,
    resnet_recipe,
)


def read_rows(table, folder):
    rows = [(folder + config, *rest) for config, *rest in read_table(table)]
    rows = [row for row in rows if COMPARED.fullmatch(row[0])]
    depths = {"": 50, "depth=101": 101, "depth=152": 152}
    return [(name, depths[options], float(ours)) for name, options, ours in rows]


def millions(parameters):
    return sum(parameter.numel() for parameter in parameters) / 1e6


IMAGENET, COCO = read_rows("imagenet.csv", "imagenet/"), read_rows("coco.csv", "")


def test_every_config_has_a_row():
    compared = {name for name in FILES if COMPARED.fullmatch(name)}
    assert compared == {name for name, *_ in IMAGENET + COCO}


@pytest.mark.parametrize(("name", "depth", "ours"), IMAGENET)
def test_classifier(name, depth, ours):
    cfg = load(name)
    cfg.model.backbone.depth = depth
    model = build(cfg)
    if depth == 50:
        check_parameters(name, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert millions(trained) == pytest.approx(ours, abs=0.00006)
    resnet_recipe(cfg, name, model)


@pytest.mark.parametrize(
    ("kind", "depth", "parameters"),
    [
        ("mrla_mm.DLALight", 50, 28_581_812),
        ("mrla_mm.DLALight", 101, 47_783_006),
        ("mrla_mm.KCLA", 50, 25_728_260),
        ("mrla_mm.KCLA", 101, 44_916_398),
    ],
)
def test_parameters_of_later_methods(kind, depth, parameters):
    options = dict(layer_attention=dict(type=kind), zero_init_attention=kind != "mrla_mm.KCLA")
    backbone = MODELS.build(dict(type="MRLAResNet", depth=depth, **options))
    assert count(backbone) + 2049 * 1000 == parameters


@pytest.mark.parametrize(("name", "depth", "ours"), COCO)
def test_detector(name, depth, ours):
    """What is trained; with GC and NL the paper counts the frozen layers too."""
    cfg = load(name)
    check_schedule(cfg, epochs=12, batch=16)
    assert cfg.optim_wrapper.optimizer.lr == (0.01 if "retinanet" in name else 0.02)
    assert cfg.model.backbone.init_cfg.checkpoint == "torchvision://resnet50"
    cfg.model.backbone.depth = depth
    everything = "_gc_" in name or "_nl_" in name
    model = build(cfg)
    if depth == 50:
        check_parameters(name, model)
    counted = [p for p in model.parameters() if p.requires_grad or everything]
    assert millions(counted) == pytest.approx(ours, abs=0.00006)
