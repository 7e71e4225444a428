import pytest
import torch
from mmcv.ops import sigmoid_focal_loss
from torch.testing import assert_close

from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in


def sample(device, dtype=torch.float64, rows=7, classes=4):
    logits = (
        (torch.randn(rows, classes, dtype=torch.float64) * 3).to(device, dtype).requires_grad_()
    )
    target = torch.arange(rows, device=device) % (classes + 1)  # the last is background
    return logits, target, torch.rand(classes, device=device, dtype=dtype) + 0.5


def formula(logits, target, gamma, alpha, weight=None):
    """The paper's loss, literally, (N, C)."""
    p = logits.sigmoid()
    hot = torch.nn.functional.one_hot(target, logits.shape[1] + 1)[:, :-1].bool()
    loss = torch.where(
        hot, -alpha * (1 - p) ** gamma * torch.log(p), -(1 - alpha) * p**gamma * torch.log(1 - p)
    )
    if weight is not None:
        loss = loss * torch.cat([weight, weight.new_ones(1)])[target, None]
    return loss


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        *((torch.float64, each) for each in ("none", "mean", "sum")),
        (torch.float16, "none"),
        (torch.bfloat16, "none"),
    ],
)
def test_sigmoid(device, gamma, weighted, dtype, reduction):
    logits, target, weight = sample(device, dtype)
    weight, exact = (weight, weight.double()) if weighted else (None, None)
    reduce = {
        "none": lambda loss: loss,
        "mean": lambda loss: loss.sum() / len(target),
        "sum": torch.sum,
    }[reduction]
    check_op(
        lambda x: sigmoid_focal_loss(x, target, gamma, 0.3, weight, reduction),
        lambda x: reduce(formula(x, target, gamma, 0.3, exact)),
        [logits],
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_is_stable_far_out(device, dtype):
    logits = torch.tensor(
        [[-200.0, 200.0], [200.0, -200.0]], device=device, dtype=dtype, requires_grad=True
    )
    loss = sigmoid_focal_loss(logits, torch.tensor([0, 0], device=device), 2.0, 0.25, None, "none")
    assert_close(
        loss, torch.tensor([[50.0, 150.0], [0.0, 0.0]], device=device, dtype=dtype)
    )  # alpha |x| where wrong
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    assert_close(grad, torch.tensor([[-0.25, 0.75], [0.0, 0.0]], device=device, dtype=dtype))
