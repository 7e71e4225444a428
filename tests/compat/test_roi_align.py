import pytest
import torch
from mmcv.ops import roi_align

from . import reference
from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in

ROIS = [
    [0, 3.1, 2.3, 17.9, 22.2],
    [1, 0.0, 0.0, 26.0, 18.0],  # the whole map
    [1, -9.0, -7.0, 8.0, 9.0],  # across the border
    [0, 20.0, 10.0, 44.0, 33.0],
    [0, 70.0, 70.0, 90.0, 90.0],  # outside
    [1, 5.3, 4.2, 5.4, 4.4],  # smaller than a pixel
    [0, 4.0, 4.0, 4.0, 4.0],  # without area
]
EXACT = [(torch.float64, aligned, ratio) for aligned in (True, False) for ratio in (0, 2)]


def maps(device, dtype=torch.float64):
    return torch.randn(2, 3, 9, 13, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(
    ("dtype", "aligned", "ratio"), [*EXACT, (torch.float16, True, 0), (torch.bfloat16, True, 0)], ids=str
)
def test_output_and_gradient(device, mode, dtype, aligned, ratio):
    rois = torch.tensor(ROIS, device=device).to(dtype)
    arguments = ((3, 2), 0.5, ratio, mode, aligned)
    expected = lambda x: reference.roi_align(x, rois.double(), *arguments)  # noqa: E731
    check_op(lambda x: roi_align(x, rois, *arguments), expected, [maps(device, dtype)], atol=1e-3)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_no_rois(device, mode):
    x = maps(device)
    out = roi_align(x, x.new_zeros(0, 5), (3, 2), 0.5, 0, mode, True)
    assert out.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() == 0
