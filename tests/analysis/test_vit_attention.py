"""Attention maps computed anew are those the model used: with its values they give what its attention gave."""

import csv

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from mrla_mm.analysis import vit_attention
from mrla_mm.analysis.vit_attention import PatchAttention, TokenRecorder
from mrla_mm.backbones import CeiT, ViT
from mrla_mm.errors import InputError
from tests.analysis.small_models import vit


@pytest.fixture
def picture():
    return torch.rand(1, 3, 40, 56, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("layer", [1, 4, -1])
@torch.no_grad()
def test_weights_times_values_are_the_attentions_output(layer, picture):
    model = vit("MRLALight")
    given = {}
    with TokenRecorder(model, layer) as recorder:
        attention = recorder.attention
        handle = attention.register_forward_hook(lambda module, args, result: given.update(x=args[0], y=result))
        model(picture)
    handle.remove()
    weights = recorder.weights()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    values = attention.qkv(given["x"]).unflatten(-1, (3, 2, 8))[:, :, 2].transpose(1, 2)  # (B, G, N, d)
    found = attention.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, given["y"])
    assert weights.std(-1).min() > 1e-4, "uniform attention would prove nothing"
    assert recorder.grid == (5, 7) and recorder.cell == (8, 8)
    maps, extra = recorder.attention_of((2, 3))
    torch.testing.assert_close(maps.flatten(1), weights[0, :, 1 + 2 * 7 + 3, 1:])
    torch.testing.assert_close(extra[:, 0], weights[0, :, 1 + 2 * 7 + 3, 0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_extra_tokens_and_stems():
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
    distilled = ViT(arch, img_size=32, patch_size=8, with_dist_token=True).eval()
    with TokenRecorder(distilled) as recorder:
        distilled(torch.rand(1, 3, 24, 32))
    assert recorder.attention_of((2, 3))[1].shape == (2, 2)
    ceit = CeiT(arch, stem_channels=8, img_size=64).eval()
    with TokenRecorder(ceit) as recorder:
        ceit(torch.rand(1, 3, 64, 96))
    assert recorder.grid == (4, 6) and recorder.cell == (16, 16)


@torch.no_grad()
def test_what_cannot_be(picture):
    model = vit("MRLABase")
    with pytest.raises(InputError, match="layer 7: the model has layers 1 to 6"):
        TokenRecorder(model, 7)
    with pytest.raises(InputError, match="layer 0: the model has layers 1 to 6"):
        TokenRecorder(model, 0)
    with pytest.raises(InputError, match="Conv2d has no vision transformer"):
        TokenRecorder(nn.Conv2d(3, 3, 1))
    with TokenRecorder(model) as recorder:
        model(picture)
    with pytest.raises(InputError, match="patch 5 0 lies outside the 5 x 7 grid: rows are 0 to 4, columns 0 to 6"):
        recorder.attention_of((5, 0))


def test_picture_and_table(tmp_path):
    maps = torch.zeros(2, 5, 7)
    maps[0, 4, 6] = maps[1, 0, 0] = 0.5
    grey = np.full((40, 56, 3), 128, np.uint8)
    one = PatchAttention("model", 3, (2, 3), (8, 8), maps, torch.tensor([[0.25], [0.125]]), grey)
    picture = cv2.imread(str(vit_attention.plot_heads([one, one], tmp_path / "new/heads.png")))
    assert min(picture.shape[:2]) > 200
    red = (picture[..., 2] > 240) & (picture[..., :2].max(-1) < 30)
    assert red.sum() > 200, "the box of the query"
    rows = list(csv.DictReader(vit_attention.write_csv([("a.png", one)], tmp_path / "attention.csv").open()))
    assert len(rows) == 2 * (1 + 35)
    assert rows[0] | dict(image="a.png", head="1", row="", column="", weight="0.25") == rows[0]
    assert rows[35] | dict(head="1", row="4", column="6", weight="0.5") == rows[35]
