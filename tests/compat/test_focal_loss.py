import pytest
import torch
from mmcv.ops import sigmoid_focal_loss
from torch.testing import assert_close

from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_sigmoid(device, gamma, weighted, dtype):
    logits = torch.randn(7, 4, dtype=torch.float64) * 3
    target = torch.arange(7, device=device) % 5  # the last is background
    weight = torch.rand(4).to(device, dtype) + 0.5 if weighted else None

    def formula(x):
        p = x.sigmoid()
        hot = torch.nn.functional.one_hot(target, 5)[:, :-1].bool()
        hit, miss = -0.3 * (1 - p) ** gamma * p.log(), -0.7 * p**gamma * (1 - p).log()
        loss = torch.where(hot, hit, miss)
        if weighted:
            loss = loss * torch.cat([weight, weight.new_ones(1)])[target, None].double()
        return loss

    check_op(
        lambda x: sigmoid_focal_loss(x, target, gamma, 0.3, weight, "none"),
        formula,
        [logits.to(device, dtype).requires_grad_()],
        atol=1e-6,
    )


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_sigmoid_is_stable_far_out(device, gamma):
    """There the loss is alpha |x| where the sign is wrong, else zero."""
    options = dict(device=device, dtype=torch.bfloat16)
    logits = torch.tensor([[-200.0, 200.0], [200.0, -200.0]], **options, requires_grad=True)
    target = torch.tensor([0, 0], device=device)
    loss = sigmoid_focal_loss(logits, target, gamma, 0.25, None, "none")
    assert_close(loss, torch.tensor([[50.0, 150.0], [0.0, 0.0]], **options))
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    assert_close(grad, torch.tensor([[-0.25, 0.75], [0.0, 0.0]], **options))
