"""Extreme numbers and half precision: gates, softmax and normalisation stay finite on every path, models near fp32."""

import copy
import itertools

import pytest
import torch

from mrla_mm import attention, backbones
from mrla_mm.ops import Affine, LightWeights, light, softmax_scores, weighted_sum
from mrla_mm.ops.reference import feature_map, linear_attention, linear_state

from ..ops.test_fused import needs_triton
from .test_arguments import BACKBONES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = ["reference", "folded", pytest.param("triton", marks=needs_triton)]
HALVES = [torch.float32, torch.bfloat16, torch.float16]
# Tried until no gradient is too large for the type; without a scale fp16 turns EfficientNet's small ones into 0.
LOSS_SCALES = {torch.float16: (2.0**12, 2.0**8, 2.0**4, 1.0), torch.bfloat16: (1.0,)}
EXTREMES = {
    "zeros": lambda x: x * 0,
    "equal": lambda x: x * 0 + 3,
    "large": lambda x: x * 0 + 1e4,
    "negative": lambda x: x * 0 - 1e4,
    "both signs": lambda x: x.sign() * 1e4,
    "tiny": lambda x: x * 1e-7,
    "one spike": lambda x: torch.where(torch.arange(x.numel(), device=x.device).view(x.shape) == 7, 3e4, 0.0),
}


def maps(kind, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 8, 5, 7, generator=generator)
    return EXTREMES[kind](x).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
def test_light_and_softmax_stay_finite(path, dtype, kind, monkeypatch):
    """Values and all gradients, with scores that saturate the gate and make the softmax choose one layer."""
    monkeypatch.setenv("MRLA_OPS", path)
    small = dict(device=DEVICE, requires_grad=True, dtype=dtype)
    query, key = torch.full((1, 1, 3), 5.0, **small), torch.full((1, 1, 3), -5.0, **small)
    value, scale = torch.full((8, 1, 3, 3), 0.1, **small), torch.ones(8, **small)
    affine = Affine(torch.full((8,), 0.5, device=DEVICE), torch.zeros(8, device=DEVICE))
    x, previous = maps(kind, dtype), maps("both signs", dtype, seed=1)
    scores = softmax_scores(
        x.float().mean((2, 3)).unflatten(1, (2, 4)),
        [m.float().mean((2, 3)).unflatten(1, (2, 4)) for m in (x, previous)],
    )
    assert torch.allclose(scores.sum(-1), torch.ones_like(scores[..., 0]))
    for out in (
        light(x, previous, LightWeights(query, key, value, scale), heads=2),
        light(x, previous, LightWeights(query, key, value, scale), heads=2, affine=affine),
        weighted_sum(scores, [previous, x], x=x, affine=affine),
    ):
        assert torch.isfinite(out).all()
        leaves = [x, previous, query, key, value, scale]
        grads = torch.autograd.grad(out.float().mean(), leaves, retain_graph=True, allow_unused=True)
        assert all(torch.isfinite(grad).all() for grad in grads if grad is not None)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("query", [-1e4, -30.0, 0.0, 1e4])
@pytest.mark.parametrize("key", [-1e4, -40.0, -20.0, 0.0, 1e4])
def test_linear_attention_stays_finite(dtype, query, key):
    """One layer attends to itself alone, so the result is its value, however small phi is; 0 where phi is 0."""
    q, k = torch.full((1, 2, 4), query), torch.full((1, 2, 4), key)
    value = torch.randn(1, 8, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = linear_attention(q, linear_state(k, value), feature_map(k))
    wanted = torch.zeros_like(value) if key == -1e4 else value
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
def test_attentions_stay_finite(name, kind, dtype):
    """Two layers of each variant, in the precision of their maps."""
    torch.manual_seed(0)
    module = getattr(attention, name)(8, head_channels=4).to(DEVICE, dtype)
    x = maps(kind, dtype)
    out, memory = module(x, x)
    out, memory = module(out, x, memory)
    out.float().mean().backward()
    assert out.dtype == dtype and torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def outputs_and_gradients(model, x, context, loss_scale=1.0):
    """Outputs and gradients, these through a loss that is scaled as training in half precision scales it."""
    model.zero_grad()
    with context:
        outs = model(x)
    (loss_scale * sum(out.float().square().mean() for out in outs)).backward()
    grads = {name: p.grad.float() / loss_scale for name, p in model.named_parameters() if p.grad is not None}
    return [out.float() for out in outs], grads


@pytest.mark.parametrize("variant", ["MRLALight", "MRLABase", "LinearRLA"])
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(
    ("device", "dtype", "layout"),
    [("cpu", torch.bfloat16, torch.contiguous_format), ("cpu", torch.float16, torch.contiguous_format)]
    + [
        pytest.param("cuda", *kind, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
        for kind in itertools.product((torch.bfloat16, torch.float16), (torch.contiguous_format, torch.channels_last))
    ],
    ids=str,
)
def test_autocast_is_near_single_precision(device, dtype, layout, name, variant):
    """Forward and backward of every backbone under autocast: finite, and as near as eight bits of mantissa allow."""
    torch.manual_seed(0)
    arguments = BACKBONES[name][1] | dict(
        layer_attention=dict(type=variant, head_channels=4), zero_init_attention=False
    )
    model = getattr(backbones, name)(**arguments).to(device)
    model.init_weights()
    model = model.to(memory_format=layout)
    model.eval()  # batch statistics of a few pixels would magnify rounding
    x = torch.rand(2, 3, 64, 64, device=device).contiguous(memory_format=layout)
    wanted, exact = outputs_and_gradients(copy.deepcopy(model), x, torch.autocast(device, enabled=False))
    for scale in LOSS_SCALES[dtype]:
        found, grads = outputs_and_gradients(model, x, torch.autocast(device, dtype=dtype), scale)
        if all(torch.isfinite(grad).all() for grad in grads.values()):
            break
    for a, b in zip(found, wanted, strict=True):
        assert torch.isfinite(a).all() and (a - b).norm() <= 0.05 * b.norm()
    assert grads.keys() == exact.keys() and all(torch.isfinite(grad).all() for grad in grads.values())
    a, b = (torch.cat([g.flatten() for g in group.values()]) for group in (grads, exact))
    assert torch.dot(a, b) >= 0.98 * a.norm() * b.norm(), "the gradient points elsewhere"
