"""The stand-in ops beside mmcv's compiled ones: the same wrappers of mmcv.ops, the same inputs, values and gradients.

Runs where a compiled mmcv is installed, as on the OneDL stack of tools/matrix.py. The largest difference of each test
goes into the JUnit report (`--junitxml`).
"""

import sys
import types

import mmcv.ops
import pytest
import torch
from torch.testing import assert_close

from mrla_mm import compat
from mrla_mm.compat.ext_ops import OPS
from tests.compat.test_deform import GEOMETRIES, tensors
from tests.compat.test_roi_align import CASES, MODES, ROIS

pytestmark = pytest.mark.skipif(compat.ext.is_stand_in(), reason="no compiled mmcv is installed to compare with")
TOLERANCE = {torch.float32: dict(rtol=1e-4, atol=1e-5), torch.float64: dict(rtol=1e-9, atol=1e-9)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def both(monkeypatch, module, call):
    """What `call` returns with the compiled ops of a module of mmcv.ops, and with the stand-in's in their place."""
    compiled = call()
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[f"mmcv.ops.{module}"], "ext_module", types.SimpleNamespace(**OPS))
        return compiled, call()


@pytest.fixture
def agree(record_property):
    """Return `agree(pair, dtype)`, which compares two tuples of tensors and records the largest difference."""

    def agree(pair, dtype):
        for compiled, ours in zip(*pair, strict=True):
            assert_close(ours, compiled, **TOLERANCE[dtype])
        differences = (float((a - b).abs().max()) for a, b in zip(*pair, strict=True) if a.numel())
        record_property("largest_difference", max(differences, default=0.0))

    return agree


def with_gradients(function, leaves):
    """Call `function` on leaves; its output and the gradients of a fixed random sum of it."""
    out = function(*leaves)
    by = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, by)


def crowd(dtype, device, number=200):
    """Boxes that overlap in every degree, some twice, and scores without ties."""
    corner, size = torch.rand(number, 2, dtype=dtype) * 60, torch.rand(number, 2, dtype=dtype) * 40 + 1
    boxes = torch.cat([corner, corner + size], dim=1)
    boxes[-5:] = boxes[:5]
    return boxes.to(device), (torch.randperm(number).to(dtype) / number).to(device)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
def test_nms(device, offset, threshold, agree, monkeypatch):
    boxes, scores = crowd(torch.float32, device)
    pair = both(monkeypatch, "nms", lambda: mmcv.ops.nms(boxes, scores, threshold, offset))
    agree(pair, torch.float32)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms(method, offset, agree, monkeypatch):
    boxes, scores = crowd(torch.float32, "cpu")
    pair = both(
        monkeypatch,
        "nms",
        lambda: mmcv.ops.soft_nms(boxes, scores, 0.3, sigma=0.5, min_score=1e-3, method=method, offset=offset),
    )
    agree(pair, torch.float32)


@DTYPES
@CASES
@MODES
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(device, dtype, mode, aligned, ratio, agree, monkeypatch):
    x = torch.randn(2, 3, 9, 13, dtype=dtype, device=device, requires_grad=True)
    rois = torch.tensor(ROIS, dtype=dtype, device=device)

    def call():
        return with_gradients(lambda leaf: mmcv.ops.roi_align(leaf, rois, (3, 2), 0.5, ratio, mode, aligned), [x])

    agree(both(monkeypatch, "roi_align", call), dtype)


@pytest.mark.parametrize("weighted", [False, True])
def test_sigmoid_focal_loss(device, weighted, agree, monkeypatch):
    if device.type == "cpu":
        pytest.skip("compiled mmcv has no focal loss for the CPU")
    logits = torch.randn(50, 7, device=device, requires_grad=True)
    target = torch.randint(0, 8, (50,), device=device)
    weight = torch.rand(7, device=device) if weighted else None

    def call():
        return with_gradients(lambda x: mmcv.ops.sigmoid_focal_loss(x, target, 2.0, 0.25, weight, "none"), [logits])

    agree(both(monkeypatch, "focal_loss", call), torch.float32)


@DTYPES
@GEOMETRIES
def test_deform_conv(device, dtype, geometry, agree, monkeypatch):
    inputs = [t.detach().requires_grad_() for t in tensors(geometry, device, dtype)[:3]]

    def call():
        return with_gradients(lambda *leaves: mmcv.ops.deform_conv2d(*leaves, *geometry.values()), inputs)

    agree(both(monkeypatch, "deform_conv", call), dtype)


@DTYPES
@GEOMETRIES
def test_modulated_deform_conv(device, dtype, geometry, agree, monkeypatch):
    x, offset, weight, mask, bias = (t.detach().requires_grad_() for t in tensors(geometry, device, dtype))

    def call():
        return with_gradients(
            lambda *leaves: mmcv.ops.modulated_deform_conv2d(*leaves, *geometry.values()),
            [x, offset, mask, weight, bias],
        )

    agree(both(monkeypatch, "modulated_deform_conv", call), dtype)
