"""Attention maps computed anew are those the model used: with its values they give what its attention gave."""

import pytest
import torch
from torch import nn

from mrla_mm.analysis.vit_attention import last_layer_attention
from mrla_mm.backbones import CeiT
from mrla_mm.errors import InputError
from tests.analysis.small_models import vit


@torch.no_grad()
def test_weights_times_values_are_the_attentions_output():
    model, given = vit("MRLALight"), {}
    attention = model.layers[-1].attn
    handle = attention.register_forward_hook(lambda module, args, out: given.update(x=args[0], y=out))
    picture = torch.rand(1, 3, 40, 56, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights, grid = last_layer_attention(model, picture)
    handle.remove()
    assert grid == (5, 7) and weights.shape == (1, 2, 36, 36)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    values = attention.qkv(given["x"]).unflatten(-1, (3, 2, 8))[:, :, 2].transpose(1, 2)  # (B, G, N, d)
    torch.testing.assert_close(attention.proj((weights @ values).transpose(1, 2).flatten(2)), given["y"])
    assert weights.std(-1).min() > 1e-4, "uniform attention would prove nothing"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_stems_and_models_without_a_transformer():
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
    ceit = CeiT(arch, stem_channels=8, img_size=64).eval()
    assert last_layer_attention(ceit, torch.rand(1, 3, 64, 96))[1] == (4, 6)
    with pytest.raises(InputError, match="Conv2d"):
        last_layer_attention(nn.Conv2d(3, 3, 1), torch.rand(1, 3, 64, 96))
