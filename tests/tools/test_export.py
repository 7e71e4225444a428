"""The export tool on the three detectors: the graphs it cuts and what they compute."""

from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from mmengine.registry import MODELS, init_default_scope

from mrla_mm import export
from mrla_mm.config import read_config

from ..conftest import load_tool, tiny_options

pytest.importorskip("onnxruntime", reason="needs the extra `deploy`")
pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
PARTS = {"retinanet": ["dense"], "mask_rcnn": ["dense", "boxes", "masks"]}


def small_options(name):
    """Return --cfg-options of a detector with few layers and channels."""
    options = [
        option for option in tiny_options(name, "none") if option.startswith("model.backbone")
    ]
    options += [
        "model.backbone.layer_attention.head_channels=16",
        "model.backbone.base_channels=16",
    ]
    options += ["model.neck.in_channels=[16,32,64,128]", "model.neck.out_channels=16"]
    if "retinanet" in name:
        head = "model.bbox_head"
        return [
            *options,
            f"{head}.in_channels=16",
            f"{head}.feat_channels=16",
            f"{head}.stacked_convs=1",
        ]
    options += ["model.rpn_head.in_channels=16", "model.rpn_head.feat_channels=16"]
    for part in ("bbox", "mask") if "mask" in name else ("bbox",):
        roi_head = f"model.roi_head.{part}"
        options += [f"{roi_head}_roi_extractor.out_channels=16", f"{roi_head}_head.in_channels=16"]
    options += ["model.roi_head.bbox_head.fc_out_channels=32"]
    return options + (["model.roi_head.mask_head.conv_out_channels=16"] if "mask" in name else [])


@pytest.fixture
def save_model(tmp_path):
    """Return `save(name)`, which writes a checkpoint of a small detector; returns it and the tool's arguments."""

    def save(name):
        torch.manual_seed(0)
        config, checkpoint, options = (
            f"mrla_mm::{name}.py",
            tmp_path / "model.pth",
            small_options(name),
        )
        argv = [
            config,
            checkpoint,
            "--shape",
            64,
            96,
            "--out-dir",
            tmp_path,
            "--cfg-options",
            *options,
        ]
        args = load_tool("export").parse_args([str(each) for each in argv])
        init_default_scope("mmdet")
        model = MODELS.build(read_config(config, args.cfg_options).model)
        for key, parameter in model.backbone.named_parameters():
            if "mrla" in key and key.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.0)  # layer attention takes part
        torch.save(dict(state_dict=model.state_dict()), checkpoint)
        return model.eval(), argv

    return save


@pytest.mark.slow
@pytest.mark.parametrize(("detector", "sizes"), [("retinanet", []), ("mask_rcnn", ["--dynamic"])])
def test_detector(detector, sizes, save_model, run_tool, tmp_path):
    """The tool compares each graph with the model, for moving sizes also at other ones, and fails if they differ."""
    name = f"{detector}_r50_mrla_light_1x"
    _, argv = save_model(name)
    with redirect_stdout(StringIO()) as printed:
        code, errors = run_tool("export", *argv[:2], *sizes, *argv[2:])
    assert code == 0, errors
    assert printed.getvalue().count("difference") == len(PARTS[detector])
    assert sorted(tmp_path.glob("*.onnx")) == sorted(
        tmp_path / f"{name}.{part}.onnx" for part in PARTS[detector]
    )


@pytest.mark.slow
def test_graphs_together_give_what_mmdet_predicts(save_model, tmp_path):
    """Dense, proposals as mmdet decodes them, then boxes: the scores and deltas behind mmdet's own detections."""
    model, _ = save_model("faster_rcnn_r50_mrla_light_1x")
    graphs = export.graphs_of(model, (64, 96))
    for name, graph in graphs.items():
        export.to_onnx(
            graph, tmp_path / f"{name}.onnx", dynamic=name == "boxes"
        )  # any number of RoIs
    run = {
        name: export.onnx_runner(graph, tmp_path / f"{name}.onnx") for name, graph in graphs.items()
    }
    image, meta = (
        torch.rand(2, 3, 64, 96),
        dict(img_shape=(64, 96), ori_shape=(64, 96), scale_factor=(1.0, 1.0)),
    )
    samples = [DetDataSample(metainfo=meta) for _ in image]
    with torch.no_grad():
        maps = model.extract_feat(image)
        proposals = model.rpn_head.predict(maps, samples, rescale=False)
        rois = bbox2roi([found.bboxes for found in proposals])
        expected = model.roi_head._bbox_forward(maps, rois)
    found = run["dense"](image)
    levels = len(found) // 3
    scores = [torch.from_numpy(array) for array in found[levels : 2 * levels]]
    deltas = [torch.from_numpy(array) for array in found[2 * levels :]]
    ours = model.rpn_head.predict_by_feat(scores, deltas, batch_img_metas=[meta, meta])
    for one, expected_one in zip(ours, proposals, strict=True):
        torch.testing.assert_close(one.bboxes, expected_one.bboxes, rtol=1e-4, atol=1e-3)
    class_scores, box_deltas = run["boxes"](
        rois, *(torch.from_numpy(array) for array in found[: levels - 1])
    )
    np.testing.assert_allclose(class_scores, expected["cls_score"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(box_deltas, expected["bbox_pred"], rtol=1e-4, atol=1e-4)


def test_backbone_alone_as_a_program(save_model, run_tool, tmp_path):
    model, argv = save_model("retinanet_r50_mrla_light_1x")
    code, errors = run_tool("export", *argv[:2], "--backbone", "--format", "export", *argv[2:])
    assert code == 0, errors
    image = torch.rand(2, 3, 64, 96)
    found = torch.export.load(tmp_path / "retinanet_r50_mrla_light_1x.backbone.pt2").module()(image)
    for ours, expected in zip(found, model.backbone(image), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
