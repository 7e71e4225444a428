"""The kernels of light attention's gate against the same in plain PyTorch, at sizes that take several programs."""

import pytest
import torch

from mrla_mm.ops import Affine, LightWeights, fused
from mrla_mm.ops.gating import Gate, MapSums
from tests.ops.test_fused import device, needs_triton, poisoned

__all__ = ["poisoned"]  # a fixture of this module too


def draw(batch, channels, kernel, *, learned=True, value=True, affine=True, keep=True):
    """Random weights, affine and sums over the grid."""
    torch.manual_seed(0)
    weights = LightWeights(
        torch.randn(1, 1, kernel), torch.randn(1, 1, kernel), torch.randn(channels, 1, 3, 3) if value else None,
        torch.randn(channels) if learned else None,
    )  # fmt: skip
    found = Affine(torch.randn(channels), torch.randn(channels), torch.rand(batch) if keep else None)
    sums = MapSums(
        torch.randn(batch, channels, 9 if value else 1), torch.randn(batch, channels) if learned else None,
        torch.randn(batch, channels) if affine else None,
    )  # fmt: skip
    return [move(part) for part in (weights, found if affine else None, sums)]


def move(part):
    return part and type(part)(*(None if t is None else t.to(device()) for t in part))


@needs_triton
@pytest.mark.parametrize(
    ("path", "batch", "channels", "heads", "kernel", "options"),
    [
        ("triton", 19, 40, 2, 3, {}),
        ("triton", 1, 33, 3, 9, dict(keep=False)),
        ("triton", 2, 12, 12, 1, dict(learned=False)),
        ("triton", 17, 6, 1, 5, dict(affine=False, keep=False)),
        ("triton", 2, 34, 2, 5, dict(value=False)),
    ],
)
def test_fold_and_unfold(path, batch, channels, heads, kernel, options):
    weights, affine, sums = draw(batch, channels, kernel, **options)
    x = torch.empty(batch, channels, 3, 5, device=device())
    pooled = torch.randn(batch, channels).to(device())
    found = {}
    for way in (path, "folded"):
        arguments = dict(heads=heads, history=sums.slope is not None)
        gate, coefficients = fused.fold(way, x, Gate(pooled), weights, affine, **arguments)
        constant, by_weights, *by_affine = fused.unfold(way, x, gate, weights, affine, sums)
        per_channel = [None if t is None else t.expand(batch, channels) for t in coefficients[1:]]
        found[way] = [*gate, coefficients.taps, *per_channel, constant, *by_weights, *by_affine]
    for ours, plain in zip(found[path], found["folded"], strict=True):
        assert (ours is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@needs_triton
def test_the_kernels_run_where_they_can():
    weights, _, _ = draw(1, 8, 3)
    assert fused.gate_kernels("triton", weights).__name__ == "mrla_mm.ops.triton_gate"
    assert fused.gate_kernels("folded", weights) is None
    assert fused.gate_kernels("triton", weights._replace(query=torch.randn(8, 8), key=torch.randn(8, 8))) is None
    assert fused.gate_kernels("triton", LightWeights(value=weights.value)) is None
