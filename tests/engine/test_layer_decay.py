"""Layer-wise learning rate decay of a detector."""

import pytest
from mmengine.optim import build_optim_wrapper
from torch import nn

from mrla_mm.backbones import MRLAViT
from mrla_mm.errors import InputError

ARCH = dict(embed_dims=16, num_layers=2, num_heads=1, feedforward_channels=16)
CFG = dict(
    constructor="LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.1),
    paramwise_cfg=dict(layer_decay_rate=0.5),
)


def test_a_block_and_its_layer_attention_learn_at_the_rate_of_their_depth():
    model = nn.ModuleDict({"head": nn.Linear(2, 2)})
    model.backbone = MRLAViT(ARCH, dict(type="MRLALight", head_channels=8))
    optimizer = build_optim_wrapper(model, CFG).optimizer
    rates = {id(group["params"][0]): group["lr"] for group in optimizer.param_groups}
    rate = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert rate["head.weight"] == 1 and rate["backbone.patch_embed.projection.weight"] == 0.125
    for index, expected in enumerate((0.25, 0.5)):
        for part in ("attn.qkv", "mrla.attention.value"):
            assert rate[f"backbone.layers.{index}.{part}.weight"] == expected


def test_a_backbone_that_does_not_know_its_depth_is_refused():
    with pytest.raises(InputError, match="optim_wrapper.constructor"):
        build_optim_wrapper(nn.ModuleDict({"backbone": nn.Linear(2, 2)}), CFG)
