import pytest
import torch
from mmcv.ops import masked_conv2d

from .conftest import needs_stand_in

pytestmark = needs_stand_in


@pytest.mark.parametrize("density", [0.4, 0])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_is_the_convolution_inside_the_mask_and_zero_outside(device, kernel, density):
    image, mask = torch.randn(1, 3, 6, 7, device=device), torch.rand(1, 6, 7, device=device) < density
    weight, bias = torch.randn(4, 3, *kernel, device=device), torch.randn(4, device=device)
    padding = tuple(size // 2 for size in kernel)
    expected = torch.nn.functional.conv2d(image, weight, bias, padding=padding) * mask
    torch.testing.assert_close(masked_conv2d(image, mask, weight, bias, padding), expected, atol=1e-5, rtol=1e-5)
