import pytest
import torch
from mmcv.ops import carafe

from . import reference
from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(("kernel", "groups", "scale"), [(3, 2, 2), (5, 1, 3), (1, 4, 1)])
def test_output_and_gradients(device, kernel, groups, scale, dtype):
    features = torch.randn(2, 4, 3, 5, device=device)
    masks = torch.rand(2, groups * kernel**2, 3 * scale, 5 * scale, device=device) / kernel
    check_op(
        lambda *inputs: carafe(*inputs, kernel, groups, scale),
        lambda *inputs: reference.carafe(*inputs, kernel, groups, scale),
        [tensor.to(dtype).requires_grad_() for tensor in (features, masks)],
    )
