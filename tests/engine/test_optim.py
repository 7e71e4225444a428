"""Layer-wise learning rate decay of a detector, timm's RMSProp, and mixed precision on a CPU."""

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mrla_mm.backbones import MRLAViT


def test_a_block_and_its_layer_attention_learn_at_the_rate_of_their_depth():
    arch = dict(embed_dims=16, num_layers=2, num_heads=1, feedforward_channels=16)
    model = nn.ModuleDict({"head": nn.Linear(2, 2)})
    attention = dict(type="MRLALight", head_channels=8)
    model.backbone = MRLAViT(arch, attention, with_dist_token=True)
    cfg = dict(constructor="LayerDecayOptimWrapperConstructor")
    cfg |= dict(optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.1))
    cfg |= dict(paramwise_cfg=dict(layer_decay_rate=0.5))
    optimizer = build_optim_wrapper(model, cfg).optimizer
    rates = {id(group["params"][0]): group["lr"] for group in optimizer.param_groups}
    rate = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert rate["head.weight"] == rate["backbone.ln1.weight"] == 1
    for name in ("cls_token", "dist_token", "pos_embed", "patch_embed.projection.weight"):
        assert rate[f"backbone.{name}"] == 0.125
    for index, expected in enumerate((0.25, 0.5)):
        for part in ("attn.qkv", "mrla.attention.value"):
            assert rate[f"backbone.layers.{index}.{part}.weight"] == expected


def test_the_rmsprop_of_timm_takes_a_configs_options():
    pytest.importorskip("timm")
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    cfg = dict(optimizer=dict(type="TimmRMSpropTF", lr=0.1, alpha=0.8, weight_decay=0.1))
    cfg |= dict(paramwise_cfg=dict(norm_decay_mult=0.0))
    optimizer = build_optim_wrapper(model, cfg).optimizer
    assert type(optimizer).__name__ == "RMSpropTF"
    assert {group["alpha"] for group in optimizer.param_groups} == {0.8}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0, 0]


def test_a_cpu_computes_in_bfloat16():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = OPTIM_WRAPPERS.build(dict(type="BFloat16OptimWrapper", optimizer=optimizer))
    before = model.weight.clone()
    with wrapper.optim_context(model):
        out = model(torch.ones(2, 4))
    wrapper.update_params(out.float().sum())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight, before - 0.2)
    assert model(torch.ones(2, 4)).dtype == torch.float32
