"""Layer attention trained with other arguments of the same shapes: every loader says so."""

from collections import OrderedDict

import pytest
import torch
from mmengine.runner import load_checkpoint

from mrla_mm.backbones import MRLAViT
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

from .conftest import BASE, LIGHT, narrow, same, save

FIXED = dict(LIGHT, learnable_lambda=False)
CHANGES = {
    "heads": (LIGHT, dict(LIGHT, head_channels=8), "head_channels=16, the model has 8"),
    "gelu": (LIGHT, dict(LIGHT, value="dwconv_gelu"), "value_gelu=False, the model has True"),
    "type": (BASE, dict(BASE, type="MLA"), "type='MRLABase', the model has 'MLA'"),
    "previous": (FIXED, dict(FIXED, previous="output"), "previous='shortcut'"),
}


@pytest.mark.parametrize(("trained", "other", "expected"), CHANGES.values(), ids=CHANGES)
def test_every_loader_tells(trained, other, expected, tmp_path):
    state = narrow(18, trained).state_dict()
    path = str(save(tmp_path, {"state_dict": state}))
    model = narrow(18, other)
    before = OrderedDict(model.state_dict())
    with pytest.raises(InputError, match=expected):
        load_weights(model, path)
    assert same(model.state_dict(), before)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=expected):
            model.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError, match=expected):
        load_checkpoint(model, path, strict=True)
    assert expected in load_weights(model, path, strict=False).table()


def vit(stage_blocks, attention):
    arch = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
    return MRLAViT(arch, attention, stage_blocks=stage_blocks, img_size=64, out_type="featmap")


@torch.no_grad()
def test_stages_of_other_blocks():
    """With the shortcut as history, no block asks where its stage starts."""
    for attention in (BASE, dict(FIXED, previous="output")):
        state = vit(2, attention).state_dict()
        with pytest.raises(RuntimeError, match="layers.2.mrla.attention: .*first_in_stage=True"):
            vit(4, attention).load_state_dict(state)
    model, other = vit(2, LIGHT).eval(), vit(4, LIGHT).eval()
    other.load_state_dict(model.state_dict())
    image = torch.rand(1, 3, 64, 64)
    assert torch.equal(model(image)[0], other(image)[0])


def test_files_that_say_nothing_load(tmp_path):
    """Those of earlier versions, and those rebuilt from their tensors alone."""
    state = dict(narrow(18, BASE).state_dict())
    load_weights(narrow(18, dict(BASE, head_channels=8)), save(tmp_path, state))
    narrow(18, dict(BASE, type="MLA")).load_state_dict(state)
