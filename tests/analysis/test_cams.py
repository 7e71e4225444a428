"""Class activation maps of a classifier and a detector, against their definitions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmdet.structures import DetDataSample

from mrla_mm.analysis import cams
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model
from tests.backbones.common import randomize_zero_init

SIZE = (64, 96)


@pytest.fixture(scope="module")
def classifier():
    options = dict(depth=18, base_channels=4, stem_channels=8, layer_attention="MRLALight")
    options = {f"model.backbone.{key}": value for key, value in options.items()}
    options |= {"model.head.num_classes": 5, "model.head.in_channels": 32}
    torch.manual_seed(0)
    cfg = read_config("mrla_mm::imagenet/resnet50_mrla_light_8xb32.py", options)
    return randomize_zero_init(build_model(cfg)).eval()


@pytest.fixture(scope="module")
def detector():
    cfg = read_config("mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py", {})
    cfg.model.test_cfg.rcnn.score_thr = 0.0
    torch.manual_seed(0)
    return build_model(cfg).eval()


@pytest.fixture
def images():
    return torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(1))


SHAPES = dict(img_shape=SIZE, ori_shape=SIZE, pad_shape=SIZE)
SAMPLE = DetDataSample(metainfo=dict(SHAPES, scale_factor=(1.0, 1.0)))


def normalised(cam):
    cam = cam.relu()
    return (cam - cam.min()) / (cam.max() - cam.min())


def maps_at(model, layer, images):
    return cams.run_with_map(layer, lambda: model(images, mode="tensor"))[1][0].detach()


def test_gradcam_of_the_last_stage_is_the_classifiers_own_map(classifier, images):
    target = cams.choose_target(classifier, images)
    assert target.label == int(classifier(images, mode="tensor").argmax())
    maps = maps_at(classifier, classifier.backbone.layer4, images)
    weight = classifier.head.fc.weight[target.label].detach()
    expected = normalised(torch.einsum("k,khw->hw", weight, maps))
    found = cams.grad_cam(classifier, classifier.backbone.layer4, images, target)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("limit", [None, 3])
@torch.no_grad()
def test_scorecam_masks_the_image_with_each_map(classifier, images, limit):
    layer = classifier.backbone.layer3
    found = cams.score_cam(classifier, layer, images, cams.Target(2), max_channels=limit)
    maps = maps_at(classifier, layer, images)
    if limit:
        maps = maps[maps.flatten(1).var(1).topk(limit).indices.sort().values]
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    masks = ((maps - low) / (high - low)).nan_to_num()
    masks = F.interpolate(masks[:, None], size=SIZE, mode="bilinear")
    weights = classifier(masks * images, mode="tensor")[:, 2].softmax(0)
    assert weights.std() > 1e-3, "equal weights would prove nothing"
    expected = normalised(torch.einsum("k,khw->hw", weights, maps))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError):  # no map
        cams.score_cam(classifier, classifier.neck, images, cams.Target(0))


@torch.no_grad()
def test_the_detectors_score_by_its_definition(detector, images):
    target = cams.choose_target(detector, images, SAMPLE)
    (instances,) = cams.detect(detector, images, SAMPLE)
    best = float(instances.scores.max())
    found = cams.score(detector, images, target, SAMPLE)
    assert float(found) == pytest.approx(np.log(best / (1 - best)), rel=1e-4)
    other = int(instances.labels[instances.labels != target.label][0])
    assert cams.choose_target(detector, images, SAMPLE, other).label == other
    assert cams.choose_target(detector, images, SAMPLE, 99) is None
    same = instances.bboxes[instances.labels == target.label]
    larger = same[(same[:, 2:] - same[:, :2]).prod(1).argmax()].clone()
    larger[2] += 1.5 * (larger[2] - larger[0])  # overlaps it with an IoU of 0.4, others with less
    found = cams.score(detector, images, target._replace(box=larger), SAMPLE)
    assert float(found) == pytest.approx(np.log(0.001 / 0.999), rel=1e-4)
    nowhere = cams.Target(99, torch.tensor([0.0, 0, 8, 8]))
    with torch.enable_grad():
        assert not cams.grad_cam(detector, detector.backbone.layer3, images, nowhere, SAMPLE).any()


def test_gradcam_of_a_dense_head_whose_scores_mmdet_detaches(images):
    options = {"model.backbone.depth": 18, "model.neck.in_channels": [64, 128, 256, 512]}
    options["model.test_cfg.score_thr"] = 0.0
    torch.manual_seed(0)
    model = build_model(read_config("mrla_mm::retinanet_r50_mrla_light_1x.py", options)).eval()
    layer = model.backbone.layer3
    target = cams.choose_target(model, images, SAMPLE)
    found = cams.grad_cam(model, layer, images, target, SAMPLE)
    (scores, _), maps = cams.run_with_map(layer, lambda: model(images, mode="tensor"))
    (grad,) = torch.autograd.grad(torch.cat([each.flatten() for each in scores]).max(), maps)
    expected = normalised((grad.mean((2, 3), keepdim=True) * maps).sum(1)[0].detach())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
