"""The stand-in ops beside those of a compiled mmcv, where one is installed: same inputs, values and gradients."""

import sys
import types

import mmcv.ops
import pytest
import torch
from torch.testing import assert_close

from mrla_mm import compat
from mrla_mm.compat.ext_ops import OPS
from tests.compat.test_deform import GEOMETRIES, tensors
from tests.compat.test_nms import crowd
from tests.compat.test_roi_align import CASES, MODES, ROIS

pytestmark = pytest.mark.skipif(compat.ext.is_stand_in(), reason="no compiled mmcv is installed to compare with")


def compare(monkeypatch, module, call, leaves=()):
    """Compare what a function of leaves and its gradients are with the compiled ops and with the stand-in's."""

    def results():
        out = call(*leaves)
        by = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
        return [out.detach(), *(torch.autograd.grad(out, leaves, by) if leaves else [])]

    compiled = results()
    monkeypatch.setattr(sys.modules[f"mmcv.ops.{module}"], "ext_module", types.SimpleNamespace(**OPS))
    assert_close(results(), compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_nms(device, offset, monkeypatch):
    boxes, scores = crowd(200, device)
    compare(monkeypatch, "nms", lambda: mmcv.ops.nms(boxes, scores, 0.3, offset)[1])


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms(method, monkeypatch):
    boxes, scores = crowd(200)
    compare(monkeypatch, "nms", lambda: mmcv.ops.soft_nms(boxes, scores, 0.3, 0.5, 1e-3, method, 1)[0])


@CASES
@MODES
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(device, mode, aligned, ratio, monkeypatch):
    x, rois = torch.randn(2, 3, 9, 13, device=device, requires_grad=True), torch.tensor(ROIS, device=device)
    compare(monkeypatch, "roi_align", lambda x: mmcv.ops.roi_align(x, rois, (3, 2), 0.5, ratio, mode, aligned), [x])


@GEOMETRIES
def test_deform_conv(device, geometry, monkeypatch):
    leaves = [t.detach().requires_grad_() for t in tensors(geometry, device, torch.float32)[:3]]
    compare(monkeypatch, "deform_conv", lambda *args: mmcv.ops.deform_conv2d(*args, *geometry.values()), leaves)


@GEOMETRIES
def test_modulated_deform_conv(device, geometry, monkeypatch):
    x, offset, weight, mask, bias = (t.detach().requires_grad_() for t in tensors(geometry, device, torch.float32))
    conv = mmcv.ops.modulated_deform_conv2d
    leaves = [x, offset, mask, weight, bias]
    compare(monkeypatch, "modulated_deform_conv", lambda *args: conv(*args, *geometry.values()), leaves)
