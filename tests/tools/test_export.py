"""The export tool on the three detectors: the graphs it cuts, what they compute, and what it refuses."""

from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm import export
from mrla_mm.compat.config_scope import config_path
from mrla_mm.errors import InputError
from tests.backbones.common import wake
from tests.conftest import load_tool, tiny_options

ONNX = pytest.importorskip("onnxruntime", reason="needs the extra `deploy`")
pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
PARTS = {"retinanet": ["dense"], "mask_rcnn": ["dense", "boxes", "masks"]}


def small_options(name):
    """Return --cfg-options of a detector with few layers and channels."""
    options = [o for o in tiny_options(name, "none") if o.startswith("model.backbone")]
    options += [
        "model.backbone.layer_attention.head_channels=16",
        "model.backbone.base_channels=16",
        "model.neck.in_channels=[16,32,64,128]",
        "model.neck.out_channels=16",
    ]
    if "retinanet" in name:
        return [
            *options,
            "model.bbox_head.in_channels=16",
            "model.bbox_head.feat_channels=16",
            "model.bbox_head.stacked_convs=1",
        ]
    options += ["model.rpn_head.in_channels=16", "model.rpn_head.feat_channels=16"]
    for part in ("bbox", "mask") if "mask" in name else ("bbox",):
        options += [
            f"model.roi_head.{part}_roi_extractor.out_channels=16",
            f"model.roi_head.{part}_head.in_channels=16",
        ]
    options += ["model.roi_head.bbox_head.fc_out_channels=32"]
    return options + (["model.roi_head.mask_head.conv_out_channels=16"] if "mask" in name else [])


def arguments(name, tmp_path, *more):
    return [config_path(name), tmp_path / "model.pth", "--shape", 64, 96, "--out-dir", tmp_path, *more]


@pytest.fixture
def save_model(tmp_path):
    """Return `save(name)`, which writes a checkpoint of a small detector and returns the detector and its options."""

    def save(name):
        torch.manual_seed(0)
        options = small_options(name)
        tool = load_tool("export")
        given = [*map(str, arguments(name, tmp_path)), "--cfg-options", *options]
        cfg = Config.fromfile(config_path(name))
        cfg.merge_from_dict(dict(tool.parse_args(given).cfg_options))
        init_default_scope("mmdet")
        model = MODELS.build(cfg.model)
        wake(model.backbone)
        torch.save(dict(state_dict=model.state_dict()), tmp_path / "model.pth")
        return model.eval(), options

    return save


@pytest.mark.parametrize(("detector", "sizes"), [("retinanet", []), ("mask_rcnn", ["--dynamic"])])
def test_detector(detector, sizes, save_model, run_tool, tmp_path):
    """The tool compares each graph with the model, for moving sizes also at other ones, and fails if they differ."""
    name = f"{detector}_r50_mrla_light_1x"
    _, options = save_model(name)
    tool = ["export", *arguments(name, tmp_path, *sizes, "--cfg-options", *options)]
    with redirect_stdout(StringIO()) as printed:
        code, errors = run_tool(*tool)
    assert code == 0, errors
    assert printed.getvalue().count("  opset 18  ") == len(PARTS[detector])
    assert sorted(tmp_path.glob("*.onnx")) == sorted(tmp_path / f"{name}.{part}.onnx" for part in PARTS[detector])


def test_graphs_together_give_what_mmdet_predicts(save_model, tmp_path):
    """Dense, proposals as mmdet decodes them, then boxes: the scores and deltas behind mmdet's own detections."""
    model, _ = save_model("faster_rcnn_r50_mrla_light_1x")
    graphs = export.graphs_of(model, (64, 96))
    for name, graph in graphs.items():
        export.to_onnx(graph, tmp_path / f"{name}.onnx", dynamic=name == "boxes")  # any number of RoIs
    run = {name: export.in_onnxruntime(graph, tmp_path / f"{name}.onnx") for name, graph in graphs.items()}
    image, meta = torch.rand(2, 3, 64, 96), dict(img_shape=(64, 96), ori_shape=(64, 96), scale_factor=(1.0, 1.0))
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
    class_scores, box_deltas = run["boxes"](rois, *(torch.from_numpy(array) for array in found[: levels - 1]))
    np.testing.assert_allclose(class_scores, expected["cls_score"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(box_deltas, expected["bbox_pred"], rtol=1e-4, atol=1e-4)


def test_backbone_alone_as_a_program(save_model, run_tool, tmp_path):
    name = "retinanet_r50_mrla_light_1x"
    model, options = save_model(name)
    more = ["--backbone", "--format", "export", "--cfg-options", *options]
    assert run_tool("export", *arguments(name, tmp_path, *more))[0] == 0
    image = torch.rand(2, 3, 64, 96)
    found = torch.export.load(tmp_path / f"{name}.backbone.pt2").module()(image)
    for ours, expected in zip(found, model.backbone(image), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_weights_of_another_model_are_refused(save_model, run_tool, tmp_path):
    _, options = save_model("retinanet_r50_mrla_light_1x")
    other = arguments(
        "faster_rcnn_r50_mrla_light_1x", tmp_path, "--cfg-options", *small_options("faster_rcnn_r50_mrla_light_1x")
    )
    code, errors = run_tool("export", *other)
    assert code == 2
    assert "does not fit the model of" in errors


def test_overrides_that_nothing_reads_are_refused(run_tool, tmp_path):
    code, errors = run_tool(
        "export", *arguments("retinanet_r50_mrla_light_1x", tmp_path, "--cfg-options", "modle.type=None")
    )
    assert code == 2 and "nothing reads a key 'modle'; did you mean 'model'?" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--opset", 3], "opset 3: 18 to 25 were tried, give one of them"),
        (["--opset", 99], "opset 99: 18 to 25 were tried, give one of them"),
        (["--opset", 19, "--format", "export"], "--opset 19: opsets are ONNX's"),
        (["--out-dir", "{folder}/file"], "cannot be made a folder (it is a file)"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(more, message, run_tool, tmp_path):
    (tmp_path / "file").touch()
    more = [str(argument).format(folder=tmp_path) for argument in more]
    code, errors = run_tool("export", *arguments("retinanet_r50_mrla_light_1x", tmp_path, *more))
    assert code == 2 and message in errors, "there is no checkpoint, which would be the next error"


def test_regions_in_an_opset_that_onnxruntime_does_not_run(save_model, tmp_path):
    """RoiAlign is one of the operators that opset 22 defines anew; what is written is not taken for checked."""
    model, _ = save_model("faster_rcnn_r50_mrla_light_1x")
    graph = export.graphs_of(model, (64, 96))["boxes"]
    export.to_onnx(graph, tmp_path / "boxes.onnx", dynamic=False, opset=22)
    assert export.opset_of(tmp_path / "boxes.onnx") == 22
    try:
        run = export.in_onnxruntime(graph, tmp_path / "boxes.onnx")
    except InputError as error:
        assert "is written but not checked" in str(error) and "does not run its opset 22" in str(error)
    else:
        assert export.deviation(graph, run, graph.inputs) < 1e-4, "a newer onnxruntime runs it"
