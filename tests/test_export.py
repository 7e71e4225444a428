"""Backbones, heads and classifiers as ONNX and programs for any batch and size."""

import pytest
import torch

from mrla_mm import export
from mrla_mm.backbones import WithLayerAttention
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

from .backbones.common import FAMILIES
from .backbones.test_with_layer_attention import LIGHT_8, Network

VARIANTS = ("light", "base", "mla", "linear")
ONE_STAGE = dict(num_stages=1, out_indices=(0,), strides=(1,), dilations=(1,))
SIZES = [(2, 64, 64), (3, 96, 128), (1, 64, 96)]  # the embeddings are made for the first


def make(family, variant="light"):
    torch.manual_seed(0)
    if family == "tokens":
        return WithLayerAttention(Network, LIGHT_8, stages="tokens", zero_init_attention=False)
    options = ONE_STAGE if family == "resnet18" else {}
    return FAMILIES[family].mrla(variant, zero_init_attention=False, **options)


def assert_computes_the_same(module, run, sizes=SIZES):
    for size in sizes:
        image = torch.rand(size[0], 3, *size[1:])
        expected = export.flatten(module(image))
        for ours, theirs in zip(export.flatten(run(image)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["resnet18", "vit", "swin"])
def test_onnx_for_any_batch_and_size_or_for_one(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `optional`")
    onnx = pytest.importorskip("onnx")
    sizes = [(1, 64, 96)] if family == "swin" else SIZES
    module = make(family).eval()
    size = sizes[0][1:] if family == "swin" else None
    export.to_onnx(module, tmp_path / "model.onnx", size, {"a": "b"})
    assert_computes_the_same(module, export.onnx_runner(tmp_path / "model.onnx"), sizes)
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}, "only we could run others"
    assert [value.name for value in model.graph.output][0] == "map_0"
    assert {entry.key: entry.value for entry in model.metadata_props}["a"] == "b"


@pytest.mark.parametrize(
    ("family", "variant"),
    [*(("resnet18", v) for v in VARIANTS), ("vit", "base"), ("tokens", "light")],
)
def test_program_of_plain_operators_for_any_batch_and_size(family, variant, tmp_path):
    module = make(family, variant).eval()
    program = export.to_program(module)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "mrla_mm" in name]
    assert_computes_the_same(module, program.module())
    image, *_ = export.random_images()  # not of the size that embeddings are made for
    assert_computes_the_same(module, torch.jit.trace(module, image))
    pytest.importorskip("onnx")
    torch.onnx.export(module, (image,), str(tmp_path / "older"), dynamo=False)


SMALL_RESNET = dict(type="MRLAResNet", depth=18, layer_attention="MRLALight", init_cfg=None)
SMALL = {
    "retinanet_r50_mrla_light_1x.py": dict(
        backbone=SMALL_RESNET,
        neck=dict(in_channels=[64, 128, 256, 512], out_channels=16),
        bbox_head=dict(in_channels=16, feat_channels=16, stacked_convs=1),
    ),
    "imagenet/resnet50_mrla_light_8xb32.py": dict(
        backbone=SMALL_RESNET, head=dict(in_channels=512)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_heads_and_logits_for_any_batch_and_size(name):
    options = {f"model.{key}": value for key, value in SMALL[name].items()}
    cfg = read_config(f"mrla_mm::{name}", options)
    torch.manual_seed(0)
    model = build_model(cfg)
    module = export.select_module(model)
    run = export.to_program(module).module()
    for image in export.random_images():
        assert export.check_same(module, run, image) < 1e-4
    (image, *_) = export.random_images()
    outputs = export.flatten(model(image, mode="tensor"))
    assert len(outputs) == len(module(image)) and outputs[0].isfinite().all()


def test_detectors_of_two_stages_leave_their_backbone():
    model = build_model(read_config("mrla_mm::quickstart/faster_rcnn_r50_quarter.py", {}))
    with pytest.raises(InputError, match="--backbone"):
        export.select_module(model)
    assert export.select_module(model, backbone_only=True) is model.backbone


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: x[:1], lambda x: x * torch.nan])
def test_a_program_that_computes_something_else_is_refused(change):
    image = torch.rand(2, 3, 64, 64)
    assert export.check_same(lambda x: (x, 2 * x), lambda x: (x, 2 * x), image) == 0
    with pytest.raises(InputError):
        export.check_same(lambda x: (x, 2 * x), lambda x: (x, change(2 * x)), image)
