"""What the fused paths must take besides ordinary batches: none at all, no storage, half a norm, a compiler."""

import pytest
import torch

from mrla_mm.ops.frozen_norm import FrozenNorm
from tests.ops import test_base_block_end as base
from tests.ops.test_fused import (
    CONSTANT,
    PATHS,
    device,
    draw_block_end,
    draw_light,
    draw_sum,
    results,
    run_block_end,
    run_light,
    run_sum,
)

CASES = {
    "light": (run_light, lambda batch: draw_light((batch, 12, 3, 4), affine="dropped")),
    "sum": (run_sum, lambda batch: draw_sum((batch, 12, 3, 4), depth=2, affine="dropped")),
    "light's end": (run_block_end, lambda batch: draw_block_end((batch, 12, 3, 4), affine="dropped")),
    "base's end": (base.together, lambda batch: base.draw((batch, 12, 3, 4), depth=2, affine="dropped")),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_no_samples(case, path, monkeypatch):
    function, draw = CASES[case]
    options = dict(dtype=torch.float32, layout="contiguous", monkeypatch=monkeypatch)
    found = results(function, draw(0), path=path, **options)
    for name, expected in results(function, draw(0), path="reference", **options).items():
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_tensors_without_storage(case, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    function, draw = CASES[case]
    tensors = {name: t.to("meta").requires_grad_(name not in CONSTANT) for name, t in draw(2).items()}
    out = function(tensors)
    out.sum().backward()
    assert out.is_meta
    assert all(t.grad.shape == t.shape for name, t in tensors.items() if name not in CONSTANT)


@pytest.mark.parametrize("absent", ["weight", "bias"])
def test_norm_with_a_weight_or_a_bias_alone(absent):
    torch.manual_seed(0)
    numbers = dict(mean=torch.randn(4), variance=torch.rand(4) + 0.5, weight=torch.randn(4), bias=torch.randn(4))
    norm = FrozenNorm(**numbers | {absent: None}, eps=1e-5)
    learned = next(t.requires_grad_() for t in norm[2:4] if t is not None)
    c, cotangent = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    mean, variance, weight, bias, eps = norm
    normed = torch.nn.functional.batch_norm(c, mean, variance, weight, bias, eps=eps)
    (expected,) = torch.autograd.grad(normed, learned, cotangent)
    scale, offset = norm.fold()
    out = c * scale[:, None, None] + offset[:, None, None]
    torch.testing.assert_close(out, normed)
    torch.testing.assert_close(torch.autograd.grad(out, learned, cotangent)[0], expected)


@pytest.mark.skipif(not hasattr(torch.library, "custom_op"), reason="torch.compile needs torch >= 2.4 here")
@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_compiled_alone(case, learning, monkeypatch):
    """After a graph break a compiler meets each of them as the outermost function, with gradients or without."""
    monkeypatch.setenv("MRLA_OPS", "folded")
    torch.compiler.reset()
    function, draw = CASES[case]
    tensors = {name: t.to(device()) for name, t in draw(2).items()}
    with torch.set_grad_enabled(learning):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tensors), function(tensors))


@pytest.mark.parametrize("path", PATHS)
def test_lambda_without_a_history(path, monkeypatch):
    """As in a layer that carries its output on but was given no memory."""
    tensors = draw_light((2, 8, 3, 4), affine="none")
    del tensors["previous"]
    monkeypatch.setenv("MRLA_OPS", path)
    leaves = {name: t.float().to(device()).requires_grad_() for name, t in tensors.items()}
    run_light(leaves).sum().backward()
    assert leaves["x"].grad.isfinite().all()
    assert leaves["history_scale"].grad is None or not leaves["history_scale"].grad.any()
