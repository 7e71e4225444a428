"""The export tool: what it writes computes what mmdet's model does, for images of any size."""

import cv2
import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector

from mrla_mm.config import read_config
from mrla_mm.inference import build_model

from ..docs_fences import fences


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_detector(config, options):
    """Write config and checkpoint of an untrained detector; return it."""
    cfg = read_config(f"mrla_mm::quickstart/{config}.py", options)
    cfg.dump("my_config.py")
    torch.manual_seed(0)
    model = build_model(cfg)
    torch.save(dict(state_dict=model.state_dict()), "epoch_12.pth")
    model.cfg = cfg
    return model.eval()


def test_a_backbone_as_a_program_or_no_file(run_tool, tmp_path):
    detector = write_detector("mask_rcnn_r18_mrla_light_shapes", {})
    arguments = ["export", "my_config.py", "epoch_12.pth", "--backbone", "--format", "pt2"]
    code, error = run_tool(*arguments)
    assert code == 0, error
    image = torch.rand(2, 3, 64, 96)
    found = torch.export.load("work_dirs/export/my_config.backbone.pt2").module()(image)
    for ours, expected in zip(found, detector.backbone(image), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    code, error = run_tool("export", "my_config.py", "gone.pth", "--format", "pt2")
    assert code == 2 and "gone.pth" in error
    assert len([path for path in tmp_path.rglob("work_dirs/**/*") if path.is_file()]) == 1


@pytest.mark.slow
def test_from_file_to_boxes_as_documented(run_tool):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    detector = write_detector("rtmdet_quarter_mrla_light", {"model.bbox_head.num_classes": 3})
    code, error = run_tool("export", "my_config.py", "epoch_12.pth")
    assert code == 0, error
    (example,) = [fence for fence in fences("python") if fence.page == "docs/deployment.md"]
    for size in ((480, 640), (200, 333)):
        coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        cv2.imwrite("image.jpg", cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC))
        namespace = {}
        exec(example.text, namespace)
        expected = inference_detector(detector, "image.jpg").pred_instances
        found = namespace["detections"]
        assert len(found) == len(expected) > 10
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-3, atol=1e-4)
    shapes = [axis.shape for axis in namespace["session"].get_inputs()]
    assert shapes == [["batch", 3, "height", "width"]]
