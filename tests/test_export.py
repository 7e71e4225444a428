"""Backbones as torch.export programs and ONNX files for any batch and size, and under torch.compile."""

import pytest
import torch

from mrla_mm import export
from mrla_mm.backbones import MRLACeiT, MRLAEfficientNet, MRLAPVTv2, MRLAResNet, MRLAViT
from mrla_mm.errors import InputError
from tests.backbones.common import gradients, wake

VARIANTS = ("MRLALight", "MRLABase", "MLA", "LinearRLA")
SMALL = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
VIT = dict(img_size=64, out_type="featmap", out_indices=(0, 1), stage_blocks=2)
PVT = dict(embed_dims=16, num_layers=(2, 1, 1, 1), drop_path_rate=0.0)
FAMILIES = {
    "resnet": lambda cfg: MRLAResNet(
        18, cfg, base_channels=16, num_stages=1, out_indices=(0,), strides=(1,), dilations=(1,)
    ),
    "vit": lambda cfg: MRLAViT(SMALL, cfg, **VIT),
    "ceit": lambda cfg: MRLACeiT(SMALL, cfg, **VIT),
    "pvtv2": lambda cfg: MRLAPVTv2("b0", cfg, **PVT),
    "efficientnet": lambda cfg: MRLAEfficientNet("b0", cfg, out_indices=(2,), conv_cfg=dict(type="Conv2d")),
}
SHAPE, OTHERS = (64, 64), (((96, 128), 3), ((64, 96), 1))  # the first is the one that the embeddings are made for


def make(family, variant="MRLALight"):
    torch.manual_seed(0)
    head = 8 if family == "efficientnet" else 16
    return wake(FAMILIES[family](dict(type=variant, head_channels=head)))


def graph_of(backbone):
    return export.image_graph(backbone.eval(), torch.rand(2, 3, *SHAPE), [])


def assert_computes_the_same(graph, run):
    trials = [graph.inputs, *(export.other_inputs(graph, shape, batch) for shape, batch in OTHERS)]
    assert max(export.deviation(graph, run, inputs) for inputs in trials) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_for_any_batch_and_size(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    onnx = pytest.importorskip("onnx")
    graph = graph_of(make(family))
    export.to_onnx(graph, tmp_path / "model.onnx", dynamic=True, metadata={"a": "b"})
    assert_computes_the_same(graph, export.in_onnxruntime(graph, tmp_path / "model.onnx"))
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == export.OPSET
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}  # nothing that only we could run
    assert [value.name for value in model.graph.output] == graph.output_names
    assert {entry.key: entry.value for entry in model.metadata_props}["a"] == "b"


@pytest.mark.parametrize("opset", [export.OPSETS[1], export.OPSETS[-1]])
def test_the_file_has_the_opset_that_was_asked_for(opset, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    graph = graph_of(make("resnet"))
    export.to_onnx(graph, tmp_path / "model.onnx", dynamic=False, opset=opset)
    assert export.opset_of(tmp_path / "model.onnx") == opset
    assert export.deviation(graph, export.in_onnxruntime(graph, tmp_path / "model.onnx"), graph.inputs) < 1e-5


def test_an_exporter_that_keeps_another_opset_is_not_believed(tmp_path, monkeypatch):
    """torch warns and goes on with the opset it has, for instance where its converter does not know the one asked."""
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    monkeypatch.setattr(export, "OPSETS", range(3, 26))
    with pytest.raises(InputError, match="opset 3: this torch and onnxscript write opset 18 instead; ask for 18"):
        export.to_onnx(graph_of(make("resnet")), tmp_path / "model.onnx", dynamic=False, opset=3)
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(("family", "variant"), [*(("resnet", v) for v in VARIANTS), ("vit", "MRLABase")])
def test_program_of_plain_operators_for_any_batch_and_size(family, variant):
    graph = graph_of(make(family, variant))
    program = export.to_program(graph, dynamic=True)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "mrla_mm" in name]
    assert_computes_the_same(graph, program.module())


@pytest.mark.parametrize(("family", "variant"), [*((f, "MRLALight") for f in FAMILIES), ("resnet", "MRLABase")])
def test_train_step_compiles_to_one_graph_with_the_same_gradients(family, variant):
    torch.compiler.reset()
    backbone = make(family, variant).double().train()
    image = torch.rand(2, 3, *SHAPE, dtype=torch.float64)
    expected = gradients(backbone, image)
    found = gradients(torch.compile(backbone, backend="aot_eager", fullgraph=True), image)
    found = {name.removeprefix("_orig_mod."): grad for name, grad in found.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-7, atol=1e-9)


def test_a_graph_that_computes_something_else_is_found_out():
    graph = graph_of(make("resnet"))
    assert export.deviation(graph, lambda image: [1.01 * t for t in graph.module(image)], graph.inputs) > 1e-3
    with pytest.raises(InputError, match=r"puts out \[\(1, .* where the model puts out \[\(2, "):
        export.deviation(graph, lambda image: graph.module(image)[0][:1], graph.inputs)


def test_onnx_without_its_packages_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(InputError, match=r"onnxscript missing.*mrla_mm\[deploy\]"):
        export.to_onnx(None, tmp_path / "x.onnx", dynamic=False)
