"""Backbones as torch.export programs and ONNX files for any batch and size, and under torch.compile."""

import math

import pytest
import torch

from mrla_mm import export
from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.backbones import MRLACeiT, MRLAEfficientNet, MRLAPVTv2, MRLAResNet, MRLAViT

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
    """Return a small backbone whose layer attention takes part in the output."""
    torch.manual_seed(0)
    backbone = FAMILIES[family](dict(type=variant, head_channels=8 if family == "efficientnet" else 16))
    for branch in backbone.modules():
        if isinstance(branch, LayerAttentionResidual | TokenAttentionResidual):
            for name, child in branch.named_children():
                if name.endswith("norm"):
                    torch.nn.init.uniform_(child.weight, 0.5, 1.0)
    return backbone


def graph_of(backbone):
    return export.image_graph(backbone.eval(), torch.rand(2, 3, *SHAPE), ["map"])


def assert_computes_the_same(graph, run):
    trials = [graph.inputs, *(export.other_inputs(graph, shape, batch) for shape, batch in OTHERS)]
    assert max(export.deviation(graph, run, inputs) for inputs in trials) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_for_any_batch_and_size(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    onnx = pytest.importorskip("onnx")
    graph = graph_of(make(family))
    export.to_onnx(graph, tmp_path / "model.onnx", dynamic=True, metadata={"a": "b"})
    assert_computes_the_same(graph, export.onnx_runner(graph, tmp_path / "model.onnx"))
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == export.OPSET
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}  # nothing that only we could run
    assert [value.name for value in model.graph.output] == graph.output_names
    assert {entry.key: entry.value for entry in model.metadata_props}["a"] == "b"


@pytest.mark.parametrize(("family", "variant"), [*(("resnet", v) for v in VARIANTS), ("vit", "MRLABase")])
def test_program_of_plain_operators_for_any_batch_and_size(family, variant):
    graph = graph_of(make(family, variant))
    program = export.to_program(graph, dynamic=True)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "mrla_mm" in name]
    assert_computes_the_same(graph, program.module())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant"), [*((f, "MRLALight") for f in FAMILIES), ("resnet", "MRLABase")])
def test_train_step_compiles_to_one_graph_with_the_same_gradients(family, variant):
    torch.compiler.reset()
    backbone, image = make(family, variant).double().train(), torch.rand(2, 3, *SHAPE, dtype=torch.float64)

    def gradients(module):
        backbone.zero_grad()
        sum((level**2).sum() for level in module(image)).backward()
        return {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}

    expected = gradients(backbone)
    found = gradients(torch.compile(backbone, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_a_graph_that_computes_something_else_is_found_out():
    graph = graph_of(make("resnet"))
    assert export.deviation(graph, lambda image: [1.01 * t for t in graph.module(image)], graph.inputs) > 1e-3
    assert export.deviation(graph, lambda image: graph.module(image)[0][:1], graph.inputs) == math.inf
