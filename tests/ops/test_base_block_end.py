"""The joint end of a block with MRLA-base against the same block step by step in float64."""

import pytest
import torch

from mrla_mm.ops import base_block_end
from tests.ops.test_fused import (
    AFFINE,
    CONSTANT,
    INTERPRETED_SHAPES,
    LAYOUTS,
    SHAPES,
    affine_of,
    compare,
    draw_block_end,
    dtypes_of,
    needs_triton,
    poisoned,
)

__all__ = ["poisoned"]  # a fixture of this module too
CASES = [("folded", shape) for shape in SHAPES] + [pytest.param("triton", INTERPRETED_SHAPES[0], marks=needs_triton)]


def draw(shape, *, depth, projection="conv1d", **options):
    """Named float64 tensors for the end of a block whose stage has depth - 1 earlier layers; heads of 4 channels."""
    tensors = draw_block_end(shape, history=False, projection=projection, **options)
    for s in range(depth - 1):
        tensors[f"keys{s}"] = torch.randn(shape[0], shape[1] // 4, 4).double()
        tensors[f"values{s}"] = torch.randn(shape).double()
    return tensors


def parts(t):
    """Output, key and value."""
    earlier = tuple([t[name] for name in t if name.startswith(kind)] for kind in ("keys", "values"))
    weights = (t["query"], t["key"], t["value"])
    options = dict(heads=t["c"].shape[1] // 4, affine=affine_of(t))
    return base_block_end(t["c"], t["shortcut"], weights, earlier, **options)


def together(t):
    """One map that output, key and value all enter, so that backward gets a gradient of each."""
    out, key, value = parts(t)
    return out + 0.5 * value + key.to(out.dtype).flatten(1)[:, :, None, None]


def alone(t):
    """The output, as of a stage's last layer."""
    return parts(t)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", AFFINE[1:])
@pytest.mark.parametrize(("path", "shape"), CASES, ids=str)
def test_values_and_gradients(shape, affine, layout, path, monkeypatch):
    dtypes = dtypes_of(path)
    for depth, several in ((1, dtypes[:1]), (3, dtypes)):
        tensors = draw(shape, depth=depth, affine=affine)
        for dtype in several:
            compare(together, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


def test_last_layer_of_a_stage_and_linear_projections(monkeypatch):
    options = dict(path="folded", dtype=torch.float64, layout="contiguous", monkeypatch=monkeypatch)
    tensors = draw((2, 12, 3, 4), depth=2, projection="linear", affine="frozen")
    for function in (alone, together):
        compare(function, tensors, **options)


def test_value_alone(monkeypatch):
    gradients = []
    for path in ("reference", "folded"):
        monkeypatch.setenv("MRLA_OPS", path)
        leaves = draw((2, 12, 3, 4), depth=2, affine="frozen")
        leaves = {name: t.requires_grad_(name not in CONSTANT) for name, t in leaves.items()}
        wanted = [leaves[name] for name in ("c", "shortcut", "value")]
        gradients.append(torch.autograd.grad(parts(leaves)[2].pow(2).sum(), wanted))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("frozen", [("c",), ("shortcut",), ("query", "key", "value")], ids=str)
def test_gradients_that_are_needed(frozen, monkeypatch):
    tensors = draw((2, 12, 3, 4), depth=2, affine="frozen")
    gradients = {}
    for path in ("reference", "folded"):
        monkeypatch.setenv("MRLA_OPS", path)
        leaves = {name: t.clone().requires_grad_(name not in CONSTANT.union(frozen)) for name, t in tensors.items()}
        together(leaves).pow(2).sum().backward()
        gradients[path] = {name: leaf.grad for name, leaf in leaves.items()}
    for name, expected in gradients["reference"].items():
        assert (expected is None) == (name in CONSTANT.union(frozen))
        torch.testing.assert_close(gradients["folded"][name], expected, msg=name)


def test_one_map_besides_the_values_is_kept(monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    drawn = draw((2, 20, 9, 8), depth=2, affine="dropped")
    tensors = {name: t.requires_grad_(name not in CONSTANT) for name, t in drawn.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, _, value = parts(tensors)
    large = {t.data_ptr() for t in kept if t.numel() >= value.numel()}
    assert len(large) == 3
    assert {tensors["values0"].data_ptr(), value.data_ptr()} < large
    assert not {tensors["c"].data_ptr(), tensors["shortcut"].data_ptr()} & large
