import pytest
import torch

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmcv.ops is imported


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
