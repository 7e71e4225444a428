"""Exported detectors find what mmdet finds, in images of any size, from file to boxes."""

import importlib.util
from contextlib import redirect_stdout
from io import StringIO

import cv2
import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi

from mrla_mm import export
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

from ..docs_fences import fences

CONFIG = """
_base_ = "mrla_mm::{base}.py"
classes = ("RBC", "WBC", "Platelets")
model = dict(
    backbone=dict(depth=18, base_channels=16, stem_channels=16, frozen_stages=-1, init_cfg=None,
        norm_eval=False, zero_init_attention=False, layer_attention=dict(head_channels=16)),
    neck=dict(in_channels=[16, 32, 64, 128], out_channels=16),
    {heads}
)
"""
RPN = "rpn_head=dict(in_channels=16, feat_channels=16, anchor_generator=dict(scales=[4])), "
BOX = "bbox_roi_extractor=dict(out_channels=16), bbox_head=dict(in_channels=16, fc_out_channels=32"
MASK = "mask_roi_extractor=dict(out_channels=16), mask_head=dict(in_channels=16, num_classes=3"
RETINA = "in_channels=16, feat_channels=16, stacked_convs=1"
RCNN = "test_cfg=dict(rcnn=dict(score_thr=0.6))"
HEADS = {
    "retinanet": f"bbox_head=dict({RETINA}, num_classes=3), test_cfg=dict(score_thr=0.85)",
    "faster_rcnn": f"{RPN}roi_head=dict({BOX}, num_classes=3)), {RCNN}",
    "mask_rcnn": f"{RPN}roi_head=dict({BOX}, num_classes=3), {MASK}, conv_out_channels=8)), {RCNN}",
}
# Standard deviations of weights: scores far apart but not saturated, boxes near their anchors.
SPREAD = {"rpn_cls.weight": 0.1, "fc_cls.weight": 0.02, "retina_cls.weight": 0.004}
SPREAD |= {"_reg.weight": 0.01, "retina_reg.weight": 0.002, "conv_logits.weight": 0.5}


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(name, **options):
        text = CONFIG.format(base=f"{name}_r50_mrla_light_1x", heads=HEADS[name])
        tmp_path.joinpath("blood_cells.py").write_text(text)
        cfg = read_config("blood_cells.py", options)
        cfg.test_dataloader.dataset.pipeline[1].scale = (320, 240)
        cfg.dump("blood_cells.py")
        torch.manual_seed(0)
        model = build_model(cfg).train()
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.momentum = 1.0
        model.backbone(torch.randn(4, 3, 96, 128))  # gives the norms their statistics
        for key, weight in model.named_parameters():
            for ending, std in SPREAD.items():
                if key.endswith(ending):
                    torch.nn.init.normal_(weight, std=std)
        meta = dict(dataset_meta=dict(classes=("RBC", "WBC", "Platelets")))
        torch.save(dict(state_dict=model.state_dict(), meta=meta), "epoch_10.pth")
        model.cfg = cfg
        return model.eval()

    return make


def picture(height, width, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def predict(model, images):
    size = images[0].shape[:2]
    sample = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))
    inputs = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    samples = [DetDataSample(metainfo=sample) for _ in images]
    data = model.data_preprocessor(dict(inputs=inputs, data_samples=samples))
    with torch.no_grad():
        found = model.predict(data["inputs"], data["data_samples"], rescale=False)
    return [each.pred_instances for each in found]


def assert_same(expected, boxes, scores, labels):
    count = len(expected)
    assert count > 10, "few detections would prove little"
    assert (scores[:count] > 0).all() and not (scores[count:] > 0).any()
    assert (labels[count:] == -1).all() and (boxes[count:] == 0).all()
    boxes, scores, labels = (np.asarray(each)[:count] for each in (boxes, scores, labels))
    pixels = np.abs(expected.bboxes.numpy()[:, None] - boxes).max(-1)
    same = pixels < 1e-3
    same &= np.abs(expected.scores.numpy()[:, None] - scores) < 1e-4
    same &= expected.labels.numpy()[:, None] == labels
    assert same.any(0).all() and same.any(1).all(), pixels.min(1)


@pytest.mark.parametrize("name", HEADS)
def test_the_graph_is_mmdets_prediction_for_a_batch(name, make):
    model = make(name)
    graph = export.make_graph(model)
    images = [picture(90, 120, seed) for seed in (1, 2)]
    with torch.no_grad():
        boxes, scores, labels, *masks = graph.module(torch.from_numpy(np.stack(images)))
    for index, expected in enumerate(predict(model, images)):
        assert_same(expected, boxes[index], scores[index], labels[index])
        if masks:
            assert_masks(model, images[index], boxes[index], labels[index], masks[0][index])


def assert_masks(model, image, boxes, labels, masks):
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    inputs = model.data_preprocessor(dict(inputs=[pixels]))["inputs"]
    with torch.no_grad():
        maps = model.extract_feat(inputs)
        logits = model.roi_head._mask_forward(maps, bbox2roi([boxes]))["mask_preds"]
    valid = labels >= 0
    expected = logits[valid, labels[valid]].sigmoid()
    assert expected.std() > 0.1, "even masks would prove little"
    torch.testing.assert_close(masks[valid], expected, rtol=0, atol=1e-3)


def test_score_factors_and_points():
    cfg = read_config("mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py", {})
    cfg.model.backbone.update(depth=18, init_cfg=None)
    cfg.model.neck.update(in_channels=[64, 128, 256, 512], out_channels=32)
    cfg.model.bbox_head.update(in_channels=32, feat_channels=64, stacked_convs=1, num_classes=3)
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    torch.nn.init.normal_(model.bbox_head.conv_cls.weight, std=0.05)
    image = picture(90, 120)
    boxes, scores, labels = export.make_graph(model).module(torch.from_numpy(image)[None])
    (expected,) = predict(model, [image])
    assert_same(expected, boxes[0].detach(), scores[0].detach(), labels[0])


def test_detectors_that_predict_differently_are_refused(make):
    model = make("faster_rcnn")
    rois, settings = model.roi_head, model.roi_head.test_cfg.nms
    for option in (dict(type="soft_nms"), dict(class_agnostic=True)):
        rois.test_cfg.nms = {**settings, **option}
        with pytest.raises(InputError, match="--backbone"):
            export.make_graph(model)
    rois.test_cfg.nms = settings
    own = dict(forward=rois.bbox_roi_extractor, predict_by_feat=rois.bbox_head, predict_mask=rois)
    for name, part in own.items():
        part.__class__ = type(f"Own_{name}", (type(part),), {name: lambda *args: None})
        with pytest.raises(InputError, match=f"Own_{name}"):
            export.make_graph(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faster_rcnn", "retinanet"])
def test_from_file_to_boxes_as_documented(name, make, run_tool, tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    model = make(name)
    with redirect_stdout(StringIO()) as printed:
        code, error = run_tool("export", "blood_cells.py", "epoch_10.pth")
    assert code == 0, error
    assert "detections agree" in printed.getvalue()
    (example,) = [fence for fence in fences("python") if "import onnxruntime" in fence.text]
    folder = tmp_path / "data/bccd/JPEGImages"
    folder.mkdir(parents=True)
    for size in ((480, 640), (200, 333), (97, 64)):
        path = str(folder / "BloodImage_00007.jpg")
        cv2.imwrite(path, picture(*size))
        namespace = {}
        exec(example.text, namespace)
        boxes, scores, labels = (namespace[key] for key in ("boxes", "scores", "labels"))
        expected = inference_detector(model, path).pred_instances
        assert_same(expected, boxes, scores, labels)
    shapes = [axis.shape for axis in namespace["session"].get_inputs()]
    assert shapes == [["batch", "height", "width", 3]]


@pytest.mark.slow
def test_masks_and_a_fixed_size(make, run_tool):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    model = make("mask_rcnn")
    cv2.imwrite("image.png", picture(96, 128))
    given = ["--shape", 96, 128, "--image", "image.png"]
    code, error = run_tool("export", "blood_cells.py", "epoch_10.pth", *given)
    assert code == 0, error
    image = cv2.imread("image.png")
    run = export.onnx_runner("work_dirs/export/blood_cells.onnx")
    boxes, scores, labels, masks = run(torch.from_numpy(image)[None])
    (expected,) = predict(model, [image])
    assert_same(expected, boxes[0], scores[0], labels[0])
    assert_masks(model, image, boxes[0], labels[0], masks[0])


def test_backbone_alone_as_a_program_or_no_file(make, run_tool, monkeypatch, tmp_path):
    model = make("retinanet")
    arguments = ["export", "blood_cells.py", "epoch_10.pth", "--backbone", "--format", "pt2"]
    code, error = run_tool(*arguments, "--image", "a.png")
    assert code == 2 and "a.png" in error
    with monkeypatch.context() as patch:
        patch.setattr(export, "TOLERANCE", -1.0)
        code, error = run_tool(*arguments)
    assert code == 2 and "difference" in error
    assert not [path for path in tmp_path.rglob("work_dirs/**/*") if path.is_file()]
    code, error = run_tool(*arguments)
    assert code == 0, error
    image = torch.rand(2, 3, 64, 96)
    found = torch.export.load("work_dirs/export/blood_cells.backbone.pt2").module()(image)
    for ours, expected in zip(found, model.backbone(image), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_packages_that_onnx_needs_are_named_before_the_model_is_built(run_tool, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, errors = run_tool("export", "none.py", "none.pth")
    assert code == 2 and "onnxscript" in errors
