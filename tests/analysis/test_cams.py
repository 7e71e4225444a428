"""Class activation maps against their definitions, computed by hand, of a classifier and of a detector."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.analysis import cams
from mrla_mm.analysis.cam_plots import Explanation, plot_explanations
from mrla_mm.analysis.models import LoadedModel, Prepared
from mrla_mm.cli import locate_config
from mrla_mm.errors import InputError
from tests.analysis.small_models import randomise
from tests.conftest import missing_torchcam

pytestmark = pytest.mark.skipif(bool(missing_torchcam()), reason=missing_torchcam())


@pytest.fixture(scope="module")
def classifier():
    import mmpretrain.models  # noqa: F401

    init_default_scope("mmpretrain")
    torch.manual_seed(0)
    backbone = dict(
        type="MRLAResNet", depth=18, base_channels=4, stem_channels=8, out_indices=(3,), norm_eval=False,
        layer_attention=dict(type="MRLALight", head_channels=4), zero_init_attention=False,
    )  # fmt: skip
    head = dict(type="LinearClsHead", num_classes=5, in_channels=32)
    model = dict(type="ImageClassifier", backbone=backbone, neck=dict(type="GlobalAveragePooling"), head=head)
    return LoadedModel("classifier", randomise(MODELS.build(model)).float(), None, "mmpretrain")


@pytest.fixture(scope="module")
def detector():
    cfg = Config.fromfile(locate_config("mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"))
    cfg.model.test_cfg.rcnn.score_thr = 0.0
    init_default_scope("mmdet")
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).eval()
    return LoadedModel("detector", model, None, "mmdet")


def prepared(height=64, width=96):
    from mmdet.structures import DetDataSample

    image = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))
    size = (height, width)
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0)))
    return Prepared(image, [sample], np.full((height, width, 3), 128, np.uint8))


def normalised(cam):
    cam = cam.relu()
    return (cam - cam.min()) / (cam.max() - cam.min())


def maps_at(model, name, images):
    found = []
    handle = model.backbone.get_submodule(name).register_forward_hook(lambda m, args, out: found.append(out.detach()))
    with torch.no_grad():
        model(images, mode="tensor")
    handle.remove()
    return found[0]


def test_gradcam_of_the_last_stage_is_the_classifiers_own_map(classifier):
    """Behind global average pooling and a linear layer, Grad-CAM weighs the maps by the class's weights."""
    image = prepared()
    target = cams.choose_target(classifier, image)
    score, (found,) = cams.explain(classifier, image, target, layers=["layer4"], methods=["gradcam"])
    maps = maps_at(classifier.model, "layer4", image.inputs)
    weight = classifier.model.head.fc.weight[target.label].detach()
    torch.testing.assert_close(
        found.values, normalised(torch.einsum("k,khw->hw", weight, maps[0])), rtol=1e-3, atol=1e-4
    )
    logits = classifier.model(image.inputs, mode="tensor")[0].detach()
    assert score == pytest.approx(float(logits.max()), rel=1e-5) and target.label == int(logits.argmax())


@pytest.mark.parametrize("limit", [None, 3])
@torch.no_grad()
def test_scorecam_masks_the_image_with_each_map(classifier, limit):
    image, target = prepared(), cams.Target(2)
    options = dict(layers=["layer3"], methods=["scorecam"], max_channels=limit, batch_size=5)
    score, (found,) = cams.explain(classifier, image, target, **options)
    maps = maps_at(classifier.model, "layer3", image.inputs)[0]  # (C, h, w)
    if limit:
        maps = maps[maps.flatten(1).var(1).topk(limit).indices.sort().values]
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    masks = F.interpolate(((maps - low) / (high - low + 1e-8))[:, None], size=(64, 96), mode="bilinear")
    scores = classifier.model(masks * image.inputs, mode="tensor")[:, 2]
    weights = (scores - score).softmax(0)
    expected = normalised(torch.einsum("k,khw->hw", weights, maps))
    torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=1e-3)
    assert weights.std() > 1e-3, "equal weights would prove nothing"


@torch.no_grad()
def test_scorecam_of_a_detector_weighs_log_odds(detector):
    image = prepared()
    target = cams.choose_target(detector, image)
    explained = cams.Explained(detector, image, target, ["layer3"])
    score = float(explained.scores(image.inputs))
    assert float(explained(image.inputs)) == pytest.approx(np.log(score / (1 - score)), rel=1e-4)
    nothing = cams.Explained(detector, image, cams.Target(99, target.box), ["layer3"])
    assert float(nothing(image.inputs)) == pytest.approx(np.log(0.001 / 0.999), rel=1e-4)


def test_stages_are_found_by_their_maps(classifier, detector):
    assert cams.stage_ends(classifier.model, prepared().inputs)[-2:] == ["layer3", "layer4"]
    assert cams.stage_ends(detector.model, prepared().inputs)[-2:] == ["layer2", "layer3"]
    assert not any(module._forward_hooks for module in classifier.model.modules())


def test_a_detector_is_asked_for_its_detection(detector):
    image = prepared()
    target = cams.choose_target(detector, image)
    (instances,) = cams.detect(detector, image.inputs, image)
    score, maps = cams.explain(detector, image, target, layers=["layer2", "layer3"], max_channels=4)
    assert score == pytest.approx(float(instances.scores.detach().max()))
    assert [(one.method, one.layer) for one in maps] == [
        ("Grad-CAM", "layer2"), ("Grad-CAM", "layer3"), ("ScoreCAM", "layer2"), ("ScoreCAM", "layer3"),
    ]  # fmt: skip
    for one in maps:
        assert one.values.min() == 0 and float(one.values.max()) == pytest.approx(1, abs=1e-3), one.method
    assert [tuple(one.values.shape) for one in maps] == [(8, 12), (4, 6)] * 2
    assert detector.model.roi_head.with_mask, "the mask head is put back"


def test_the_detectors_score_by_its_definition(detector):
    image = prepared()
    target = cams.choose_target(detector, image)
    with torch.no_grad():
        (instances,) = cams.detect(detector, image.inputs, image)
    other = int(instances.labels[instances.labels != target.label][0])
    best = instances[instances.labels == other].scores.max().detach()
    everywhere = cams.choose_target(detector, image, other)
    assert everywhere.label == other
    assert float(cams.overlap_score(instances, everywhere, image.inputs)) == pytest.approx(float(best))
    nowhere = cams.Target(target.label, torch.tensor([200.0, 200, 210, 210]))
    assert float(cams.overlap_score(instances, nowhere, image.inputs)) == 0
    assert cams.explain(detector, image, nowhere, layers=["layer3"]) == (0, [])
    assert cams.choose_target(detector, image, 99) is None


def test_gradcam_of_a_detector_is_its_scores_gradient(detector):
    image = prepared()
    kept = []
    handle = detector.model.backbone.layer3.register_forward_hook(lambda module, args, out: kept.append(out))
    (instances,) = cams.detect(detector, image.inputs, image)
    handle.remove()
    (gradient,) = torch.autograd.grad(instances.scores.max(), kept[0])
    weight = gradient.mean((2, 3))[0]
    assert weight.abs().max() > 0
    expected = normalised(torch.einsum("k,khw->hw", weight, kept[0][0].detach()))
    target = cams.choose_target(detector, image)
    _, (found,) = cams.explain(detector, image, target, layers=["layer3"], methods=["gradcam"])
    torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=1e-3)


def test_missing_torchcam_and_unknown_layers(classifier, monkeypatch):
    with pytest.raises(InputError, match="--layers layer9: the backbone has no such part"):
        cams.check_layers(classifier.model, ["layer9"])
    monkeypatch.setattr(cams, "version", lambda name: "0.3.1")
    with pytest.raises(InputError, match=r"torchcam 0\.3\.1 is too old, class activation maps need 0\.4 or later"):
        cams.import_torchcam()
    monkeypatch.setitem(sys.modules, "torchcam.methods", None)
    with pytest.raises(InputError, match=r"pip install 'mrla_mm\[cam\]"):
        cams.import_torchcam()


def test_picture(tmp_path):
    import cv2

    warm = torch.zeros(4, 6)
    warm[0, 0] = 1
    grey = np.full((64, 96, 3), 128, np.uint8)
    box = torch.tensor([10.0, 10, 50, 40])
    one = Explanation("a", grey, (64, 96), cams.Target(0, box), "cat", 0.9, [cams.CamMap("Grad-CAM", "layer3", warm)])
    picture = cv2.imread(str(plot_explanations([one, one._replace(maps=[], score=0.0)], tmp_path / "new/cam.png")))
    red = (picture[..., 2] > 240) & (picture[..., :2].max(-1) < 40)
    assert red.sum() > 100, "the box"
    blue = (picture[..., 0] > picture[..., 2].astype(int) + 20).sum()
    assert blue > 1000, "the cold part of the map"
