"""Mixed precision on a CPU."""

import torch
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

import mrla_mm  # noqa: F401


def test_a_cpu_trains_in_bfloat16():
    """The forward pass computes in bfloat16, weights stay in float32, and the loss falls."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(64, 4)
    wanted = x @ torch.tensor([1.0, -2.0, 0.5, 3.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = OPTIM_WRAPPERS.build(dict(type="BFloat16OptimWrapper", optimizer=optimizer))
    losses = []
    for _ in range(20):
        with wrapper.optim_context(model):
            out = model(x)
        losses.append((out.float().squeeze(1) - wanted).square().mean())
        wrapper.update_params(losses[-1])
    assert out.dtype == torch.bfloat16 and model.weight.dtype == torch.float32
    assert losses[-1] < 0.05 * losses[0]
    assert model(x).dtype == torch.float32
