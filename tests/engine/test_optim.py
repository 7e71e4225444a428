"""Layer-wise learning rate decay of a detector, timm's RMSProp, and mixed precision on a CPU."""

import sys

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mrla_mm.backbones import MRLAViT
from mrla_mm.errors import InputError


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


TIMM = dict(type="TimmRMSpropTF", lr=0.1, alpha=0.9, momentum=0.9, eps=1e-3, weight_decay=0.1)


def test_the_rmsprop_of_timm_starts_from_an_average_of_one():
    """As TensorFlow's: eps inside the root, and momentum of steps, not of gradients."""
    pytest.importorskip("timm")
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    nn.init.ones_(model[0].weight)
    norm = model[1].weight.clone()
    cfg = dict(optimizer=TIMM, paramwise_cfg=dict(norm_decay_mult=0.0))
    optimizer = build_optim_wrapper(model, cfg).optimizer
    weight, average, step = 1.0, 1.0, 0.0
    for gradient, rate in ((0.5, 0.1), (-2.0, 0.1), (1.0, 0.01)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[0].weight.grad.fill_(gradient)
        optimizer.step()
        decayed = gradient + 0.1 * weight
        average = 0.9 * average + 0.1 * decayed**2
        step = 0.9 * step + rate * decayed / (average + 1e-3) ** 0.5
        weight -= step
        assert model[0].weight.item() == pytest.approx(weight, rel=1e-5)
    assert torch.equal(model[1].weight, norm), "norms do not decay"


def test_without_timm_its_rmsprop_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(InputError, match="pip install timm"):
        build_optim_wrapper(nn.Linear(1, 1), dict(optimizer=TIMM))


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
