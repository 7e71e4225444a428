import pytest
import torch
from torch.testing import assert_close

from mrla_mm import compat

needs_stand_in = pytest.mark.skipif(
    not compat.ext.is_stand_in(), reason="a compiled mmcv is installed"
)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def check_op(op, reference, inputs, atol=2e-3):
    """Compare an op and its gradients with a reference in float64 of the same rounded inputs."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, expected = op(*inputs), reference(*exact)
    assert out.dtype == inputs[0].dtype
    exactly = out.dtype == torch.float64
    tolerance = {} if exactly else dict(atol=atol, rtol=2 * torch.finfo(out.dtype).eps)
    assert_close(out.double(), expected, **tolerance)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    assert_close([each.double() for each in found], list(wanted), **tolerance)
