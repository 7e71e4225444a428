"""MRLAPVTv2: stages, drop path, start and sizes."""

import pytest
from torch import nn

from mrla_mm.backbones import MRLAPVTv2, PVTv2


def test_stages_and_the_drop_path_probability_are_those_of_the_blocks():
    backbone = MRLAPVTv2("b0", drop_path_rate=0.7)
    found = [block.mrla for _, blocks, _ in backbone.layers for block in blocks]
    assert [branch.attention.first_in_stage for branch in found] == [True, False] * 4
    assert isinstance(found[0].drop_path, nn.Identity)
    rates = [branch.drop_path.drop_prob for branch in found[1:]]
    assert rates == pytest.approx([0.1 * i for i in range(1, 8)])


def test_a_start_without_weights_is_mmdets():
    backbone = MRLAPVTv2("b0")
    backbone.init_weights()
    assert 0.01 < backbone.layers[0][1][0].attn.attn.out_proj.weight.std() < 0.03


def test_arguments_take_precedence_over_the_arch():
    backbone = PVTv2("b5", embed_dims=8, num_layers=(1, 1, 1, 1))
    assert [len(blocks) for _, blocks, _ in backbone.layers] == [1] * 4
    assert backbone.layers[0][1][0].ffn.feedforward_channels == 4 * 8
