import pytest
import torch
from mmcv.ops import roi_align
from torch.testing import assert_close

from tests.compat import reference
from tests.compat.stand_in import needs_stand_in

pytestmark = needs_stand_in

ROIS = [
    [0, 3.1, 2.3, 17.9, 22.2],
    [1, 0.0, 0.0, 26.0, 18.0],  # the whole map
    [1, -9.0, -7.0, 8.0, 9.0],  # across the border
    [0, 20.0, 10.0, 44.0, 33.0],
    [0, 70.0, 70.0, 90.0, 90.0],  # outside
    [1, 5.3, 4.2, 5.4, 4.4],  # smaller than a pixel
]
CASES = pytest.mark.parametrize("aligned", [True, False])
MODES = pytest.mark.parametrize("mode", ["avg", "max"])


def maps(device="cpu", dtype=torch.float64):
    return torch.randn(2, 3, 9, 13, dtype=dtype, device=device, requires_grad=True)


@CASES
@MODES
@pytest.mark.parametrize("ratio", [0, 2])
def test_output_and_gradient(device, mode, aligned, ratio):
    x, rois = maps(device), torch.tensor(ROIS, dtype=torch.float64, device=device)
    arguments = (rois, (3, 2), 0.5, ratio, mode, aligned)
    out, expected = roi_align(x, *arguments), reference.roi_align(x, *arguments)
    assert_close(out, expected)
    by = torch.randn_like(out)
    assert_close(*(torch.autograd.grad(o, x, by)[0] for o in (out, expected)))


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_only_its_inputs_and_outputs(device, mode, dtype):
    x = maps(device, dtype)
    rois = torch.tensor(ROIS, device=device).to(dtype)
    exact = x.detach().double().requires_grad_()
    out = roi_align(x, rois, (3, 2), 0.5, 0, mode, True)
    expected = reference.roi_align(exact, rois.double(), (3, 2), 0.5, 0, mode, True)
    by = torch.randn_like(out)
    assert out.dtype == dtype
    tolerance = dict(atol=1e-3, rtol=2 * torch.finfo(dtype).eps)
    assert_close(out.double(), expected, **tolerance)
    grads = [torch.autograd.grad(o, t, by.to(o.dtype))[0].double() for o, t in ((out, x), (expected, exact))]
    assert_close(*grads, **tolerance)


@MODES
def test_no_rois(device, mode):
    x = maps(device)
    out = roi_align(x, x.new_zeros(0, 5), (3, 2), 0.5, 0, mode, True)
    assert out.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() == 0


@MODES
def test_roi_without_area_is_zero(mode):
    x = maps()
    out = roi_align(x, x.new_tensor([[0, 4, 4, 4, 4]]), (2, 2), 1.0, 0, mode, True)
    assert out.abs().sum() == 0
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() == 0
