"""Backbones as ONNX files and programs for any batch and size, and under torch.compile."""

from types import SimpleNamespace

import pytest
import torch

from mrla_mm import export
from mrla_mm.backbones import WithLayerAttention
from mrla_mm.errors import InputError

from .backbones.common import FAMILIES, gradients
from .backbones.test_with_layer_attention import LIGHT_8, Network

VARIANTS = ("light", "base", "mla", "linear")
NAMES = [name for name in FAMILIES if name not in ("resnet50", "swin")]
OPTIONS = {
    "resnet18": dict(num_stages=1, out_indices=(0,), strides=(1,), dilations=(1,)),
    "efficientnet": dict(conv_cfg=dict(type="Conv2d")),
}
SIZES = [(2, 64, 64), (3, 96, 128), (1, 64, 96)]  # the embeddings are made for the first


def make(family, variant="light"):
    torch.manual_seed(0)
    if family == "tokens":
        return WithLayerAttention(Network, LIGHT_8, stages="tokens", zero_init_attention=False)
    return FAMILIES[family].mrla(variant, zero_init_attention=False, **OPTIONS.get(family, {}))


def graph_of(backbone, shape=None):
    return export.make_graph(SimpleNamespace(backbone=backbone), shape, backbone_only=True)


def assert_computes_the_same(graph, run, sizes=SIZES):
    for size in sizes:
        image = torch.rand(size[0], 3, *size[1:])
        for found, expected in zip(run(image), graph.module(image), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*NAMES, "swin"])
def test_onnx_for_any_batch_and_size_or_for_one(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    onnx = pytest.importorskip("onnx")
    sizes = [(1, 64, 96)] if family == "swin" else SIZES
    graph = graph_of(make(family), sizes[0][1:] if family == "swin" else None)
    export.to_onnx(graph, tmp_path / "model.onnx", {"a": "b"})
    assert_computes_the_same(graph, export.onnx_runner(tmp_path / "model.onnx"), sizes)
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}, "only we could run others"
    assert [value.name for value in model.graph.output] == graph.outputs
    assert {entry.key: entry.value for entry in model.metadata_props}["a"] == "b"


@pytest.mark.parametrize(
    ("family", "variant"),
    [*(("resnet18", v) for v in VARIANTS), ("vit", "base"), ("tokens", "light")],
)
def test_program_of_plain_operators_for_any_batch_and_size(family, variant, tmp_path):
    graph = graph_of(make(family, variant))
    program = export.to_program(graph)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "mrla_mm" in name]
    assert_computes_the_same(graph, program.module())
    assert_computes_the_same(graph, torch.jit.trace(graph.module, graph.images[0]))
    pytest.importorskip("onnx")
    torch.onnx.export(graph.module, (graph.images[0],), str(tmp_path / "older"), dynamo=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"), [*((f, "light") for f in NAMES), ("resnet18", "base")]
)
def test_train_step_compiles_to_one_graph_with_the_same_gradients(family, variant):
    torch.compiler.reset()
    backbone = make(family, variant).double().train()
    image = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True)
    expected, found = (list(gradients(each, image).values()) for each in (backbone, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: x[:1], lambda x: x * torch.nan])
def test_a_graph_that_computes_something_else_is_refused(change):
    image = torch.rand(2, 3, 64, 64)
    graph = export.Graph(lambda image: (image, 2 * image), [image], {}, ["map_0", "map_1"])
    assert "difference" in export.check_same(graph, graph.module, image)
    with pytest.raises(InputError):
        export.check_same(graph, lambda image: (image, change(2 * image)), image)


@pytest.mark.parametrize("output", [0, 1, 2, 3])
def test_detections_that_differ_are_refused(output):
    boxes, labels = torch.rand(1, 4, 4) * 100, torch.arange(4)[None]
    detections = boxes, torch.tensor([[0.9, 0.8, 0.7, 0.6]]), labels, torch.rand(1, 4, 5, 5)
    graph = export.Graph(lambda _: detections, [boxes], {}, ["boxes", "scores", "labels", "masks"])
    assert "4 of 4" in export.check_same(graph, lambda _: [x.flip(1) for x in detections], boxes)
    changed = [x + (index == output) for index, x in enumerate(detections)]
    none = graph._replace(module=lambda _: [0 * x for x in detections])
    for expected, run in ((graph, lambda _: changed), (none, graph.module)):
        with pytest.raises(InputError, match="0 of 4"):
            export.check_same(expected, run, boxes)
