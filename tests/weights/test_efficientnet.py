"""torchvision's EfficientNets: every tensor finds its place, the features are the same."""

import pytest
import torch
import torchvision
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from mrla_mm.backbones import MRLAEfficientNet, PlainEfficientNet
from mrla_mm.compat.config_scope import find_config
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

from .conftest import save, without


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    model = torchvision.models.efficientnet_b0().eval()
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            low = -0.5 if name.endswith(("bias", "running_mean")) else 0.5
            tensor.uniform_(low, low + 1)
    return model


@pytest.fixture
def path(original, tmp_path):
    return save(tmp_path, original.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["", "_mrla_light"])
def test_the_detectors_start_as_torchvisions_model(suffix, original, path):
    cfg = Config.fromfile(find_config(f"mrla_mm::retinanet_efficientnet_b0{suffix}_1x.py"))
    cfg = cfg.model.backbone
    cfg.init_cfg.checkpoint = str(path)
    init_default_scope("mmdet")
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    image = torch.randn(2, 3, 97, 65)
    x, features = image, []
    for part in original.features:
        features.append(x := part(x))
    for index, level in zip((2, 3, 5, 7), backbone.eval()(image), strict=True):
        scale = features[index].abs().max().item()
        assert features[index].std() > 0.1
        torch.testing.assert_close(level, features[index], rtol=1e-5, atol=1e-5 * scale)
    report = load_weights(MODELS.build(cfg), path)
    theirs = original.state_dict()
    assert len(report.unused) == sum(key.startswith("features.8.") for key in theirs) == 6
    assert len(report.matched) == len(theirs) - 2 - 6
    assert report.heads == ["head.fc.weight", "head.fc.bias"]
    assert bool(report.fresh) == bool(suffix) and all(".mrla." in key for key in report.fresh)
    assert not report.faults() and not report.additional and not report.warnings


@pytest.mark.parametrize("size", ["b1", "b4", "b7"])
def test_names_and_shapes_of_every_size(size):
    """Strictly, by torch itself: the names of blocks depend on the size."""
    with torch.device("meta"):
        theirs = getattr(torchvision.models, f"efficientnet_{size}")().state_dict()
    PlainEfficientNet(size).to("meta").load_state_dict(without(theirs, "classifier."))


CONV = dict(conv_cfg=dict(type="Conv2d"))


@pytest.mark.parametrize(("options", "advice"), [(CONV, ["eps"]), ({}, ["conv_cfg", "eps"])])
def test_settings_that_are_not_torchvisions_are_noted(options, advice, path):
    """Neither changes a shape, and either changes the features: warned of such files alone."""
    backbone = PlainEfficientNet("b0", **options)
    warnings = load_weights(backbone, path).warnings
    assert all(text in warning for text, warning in zip(advice, warnings, strict=True))
    ours = save(path.parent, backbone.state_dict(), "ours.pth")
    assert not load_weights(PlainEfficientNet("b0", **options), ours).warnings


def test_another_size_is_refused(path):
    """B1 differs from B0 by more blocks alone, so a part of its file would fit."""
    for backbone in (MRLAEfficientNet("b1", out_indices=(2, 3, 4, 5)), MRLAEfficientNet("es")):
        with pytest.raises(InputError, match="nothing was loaded"):
            load_weights(backbone, path)
