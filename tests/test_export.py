"""Backbones as torch.export programs and ONNX files for any batch and size, and under torch.compile."""

import math

import pytest
import torch

from mrla_mm import export

from .backbones.common import FAMILIES

VARIANTS, NAMES = (
    ("light", "base", "mla", "linear"),
    [name for name in FAMILIES if name != "resnet50"],
)
OPTIONS = {
    "resnet18": dict(num_stages=1, out_indices=(0,), strides=(1,), dilations=(1,)),
    "efficientnet": dict(conv_cfg=dict(type="Conv2d")),
}
SHAPE, OTHERS = (
    (64, 64),
    (((96, 128), 3), ((64, 96), 1)),
)  # the first is the one that the embeddings are made for


def make(family, variant="light"):
    """Return a small backbone whose layer attention takes part in the output."""
    torch.manual_seed(0)
    return FAMILIES[family].mrla(variant, zero_init_attention=False, **OPTIONS.get(family, {}))


def graph_of(backbone):
    return export.image_graph(backbone.eval(), torch.rand(2, 3, *SHAPE), ["map"])


def assert_computes_the_same(graph, run):
    trials = [graph.inputs, *(export.other_inputs(graph, shape, batch) for shape, batch in OTHERS)]
    assert max(export.deviation(graph, run, inputs) for inputs in trials) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_onnx_for_any_batch_and_size(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `deploy`")
    onnx = pytest.importorskip("onnx")
    graph = graph_of(make(family))
    export.to_onnx(graph, tmp_path / "model.onnx", dynamic=True, metadata={"a": "b"})
    assert_computes_the_same(graph, export.onnx_runner(graph, tmp_path / "model.onnx"))
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == export.OPSET
    assert {node.domain for node in model.graph.node} <= {
        "",
        "ai.onnx",
    }  # nothing that only we could run
    assert [value.name for value in model.graph.output] == graph.output_names
    assert {entry.key: entry.value for entry in model.metadata_props}["a"] == "b"


@pytest.mark.parametrize(
    ("family", "variant"), [*(("resnet18", v) for v in VARIANTS), ("vit", "base")]
)
def test_program_of_plain_operators_for_any_batch_and_size(family, variant):
    graph = graph_of(make(family, variant))
    program = export.to_program(graph, dynamic=True)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "mrla_mm" in name]
    assert_computes_the_same(graph, program.module())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"), [*((f, "light") for f in NAMES), ("resnet18", "base")]
)
def test_train_step_compiles_to_one_graph_with_the_same_gradients(family, variant):
    torch.compiler.reset()
    backbone, image = (
        make(family, variant).double().train(),
        torch.rand(2, 3, *SHAPE, dtype=torch.float64),
    )

    def gradients(module):
        backbone.zero_grad()
        sum((level**2).sum() for level in module(image)).backward()
        return {
            name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None
        }

    expected = gradients(backbone)
    found = gradients(torch.compile(backbone, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_a_graph_that_computes_something_else_is_found_out():
    graph = graph_of(make("resnet18"))
    assert (
        export.deviation(graph, lambda image: [1.01 * t for t in graph.module(image)], graph.inputs)
        > 1e-3
    )
    assert (
        export.deviation(graph, lambda image: graph.module(image)[0][:1], graph.inputs) == math.inf
    )
