"""A step keeps to the device of its input and never waits for it: what a GPU asks of a model, tried where none is.

Tensors on torch's meta device have shapes and no numbers. An operation that mixes them with tensors of another device
fails, and so does one that brings a number to the host, which is where a GPU would have to be waited for.
"""

import pytest
import torch

from mrla_mm import backbones
from mrla_mm.backbones import normed_conv

from ..robustness.test_arguments import BACKBONES


@pytest.mark.parametrize("path", ["reference", "folded"])
@pytest.mark.parametrize("variant", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_step_stays_on_its_device(name, variant, path, monkeypatch):
    """Forward and backward on an odd grid, with batch statistics and with frozen ones, which fold into convolutions."""
    monkeypatch.setenv("MRLA_OPS", path)
    monkeypatch.setitem(normed_conv.LEAST_NUMBERS, "cuda", 0)
    arguments = BACKBONES[name][1] | dict(
        layer_attention=dict(type=variant, head_channels=4), zero_init_attention=False, drop_path_rate=0.1
    )
    if name == "MRLAResNet":
        arguments["attention_drop_path"] = arguments.pop("drop_path_rate")
    model = getattr(backbones, name)(**arguments).to("meta")
    for batch_statistics in (True, False):
        model.train(batch_statistics).zero_grad()
        outs = model(torch.rand(2, 3, 97, 129, device="meta"))
        sum(out.square().mean() for out in outs).backward()
        for parameter in model.parameters():
            assert not parameter.requires_grad or parameter.grad.device.type == "meta"


def test_a_number_on_the_host_would_be_seen():
    """What the test above rests on."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(1, device="meta").item()
    with pytest.raises(RuntimeError):
        torch.ones(2, device="meta") * torch.ones(2)
