import pytest
import torch
from mmcv.ops import sigmoid_focal_loss
from mmdet.models.losses import FocalLoss
from torch.testing import assert_close

from tests.compat.stand_in import needs_stand_in

pytestmark = needs_stand_in

GAMMAS = pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
WEIGHTED = pytest.mark.parametrize("weighted", [False, True])


def sample(device="cpu", dtype=torch.float64, rows=7, classes=4):
    logits = (torch.randn(rows, classes, dtype=torch.float64) * 3).to(device, dtype).requires_grad_()
    target = torch.arange(rows, device=device) % (classes + 1)  # the last is background
    return logits, target, torch.rand(classes, device=device, dtype=dtype) + 0.5


def formula(logits, target, gamma, alpha, weight=None):
    """The paper's loss, literally, (N, C)."""
    p = logits.sigmoid()
    hot = torch.nn.functional.one_hot(target, logits.shape[1] + 1)[:, :-1].bool()
    loss = torch.where(hot, -alpha * (1 - p) ** gamma * torch.log(p), -(1 - alpha) * p**gamma * torch.log(1 - p))
    if weight is not None:
        loss = loss * torch.cat([weight, weight.new_ones(1)])[target, None]
    return loss


@GAMMAS
@WEIGHTED
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_sigmoid(device, gamma, weighted, reduction):
    logits, target, weight = sample(device)
    weight = weight if weighted else None
    loss = sigmoid_focal_loss(logits, target, gamma, 0.3, weight, reduction)
    expected = formula(logits, target, gamma, 0.3, weight)
    expected = {"none": expected, "mean": expected.sum() / len(target), "sum": expected.sum()}[reduction]
    assert_close(loss, expected)
    by = torch.rand_like(loss)
    assert_close(*(torch.autograd.grad(value, logits, by)[0] for value in (loss, expected)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sigmoid_in_half_precision(device, dtype):
    logits, target, _ = sample(device, dtype)
    exact = logits.detach().double().requires_grad_()
    loss, expected = sigmoid_focal_loss(logits, target, 2.0, 0.25, None, "none"), formula(exact, target, 2.0, 0.25)
    tolerance = dict(atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
    assert loss.dtype == dtype
    assert_close(loss.double(), expected, **tolerance)
    grads = [torch.autograd.grad(v.sum(), t)[0].double() for v, t in ((loss, logits), (expected, exact))]
    assert_close(*grads, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_is_stable_far_out(device, dtype):
    logits = torch.tensor([[-200.0, 200.0], [200.0, -200.0]], device=device, dtype=dtype, requires_grad=True)
    loss = sigmoid_focal_loss(logits, torch.tensor([0, 0], device=device), 2.0, 0.25, None, "none")
    assert_close(loss, torch.tensor([[50.0, 150.0], [0.0, 0.0]], device=device, dtype=dtype))  # alpha |x| where wrong
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    assert_close(grad, torch.tensor([[-0.25, 0.75], [0.0, 0.0]], device=device, dtype=dtype))


def test_mmdet_loss(device):
    """mmdet computes in Python on the CPU and calls the op on CUDA; both must give the formula."""
    logits, target, _ = sample(device)
    loss = FocalLoss(gamma=2.0, alpha=0.25)(logits, target, avg_factor=3)
    assert_close(loss, formula(logits, target, 2.0, 0.25).sum() / 3)
