"""The networks: plugins, values by hand, frozen stages, and plain weights."""

import copy

import pytest
import torch
from mmdet.models import ResNet
from mmengine.registry import MODELS

from mrla_mm.comparators import DIA
from mrla_mm.errors import InputError

from ..backbones.common import (
    assert_same_levels,
    assert_same_with_gradients,
    gradients,
    load_plain,
)


def plugin(kind, stages=(True,) * 4, cfg=None, **options):
    return dict(cfg=dict(cfg or {}, type=kind), stages=stages, position="after_conv3", **options)


SE = dict(plugins=[plugin("mrla_mm.SE")])
THIRD = (False, False, True, False)
KINDS = {
    **{
        kind: dict(plugins=[plugin(f"mrla_mm.{kind}")])
        for kind in ("SE", "ECA", "CBAM", "A2", "BA")
    },
    "GC": dict(plugins=[plugin("ContextBlock", cfg=dict(ratio=1 / 4))]),
    "NL": dict(plugins=[plugin("NonLocal2d", THIRD, blocks=(-2,))]),
    "AA": dict(dcn=dict(type="mrla_mm.AA", max_grid=40), stage_with_dcn=(False, True, True, True)),
    "DIA": dict(layer_attention=dict(type="mrla_mm.DIA", reduction=4)),
    "RLA": dict(type="mrla_mm.RLAResNet"),
    "MRLA": dict(type="MRLAResNet", layer_attention=dict(type="mrla_mm.DIA", reduction=4), **SE),
    "DLA": dict(type="MRLAResNet", layer_attention=dict(type="mrla_mm.DLALight", reduction=4)),
    "KCLA": dict(
        type="MRLAResNet", layer_attention=dict(type="mrla_mm.KCLA"), zero_init_attention=False
    ),
}


def build(kind, **options):
    cfg = dict(
        type="mrla_mm.ComparatorResNet", depth=50, base_channels=16, zero_init_residual=False
    )
    return MODELS.build(copy.deepcopy(cfg | KINDS.get(kind, {}) | options))


def run_by_hand(kind, stage, x):
    memory = ()
    for block in stage:
        first = block.norm1(block.conv1(x)).relu()
        second = block.norm2(block.conv2(first)).relu()
        out = block.norm3(block.conv3(second))
        shortcut = x if block.downsample is None else block.downsample(x)
        if kind == "BA":
            out = block.ba(out, [first, second])
        else:
            out, memory = block.mrla(out, shortcut, memory)
        x = (shortcut + out).relu()
    return x


@pytest.mark.parametrize("norm_eval", [False, True])
@pytest.mark.parametrize("kind", ["BA", "DIA"])
def test_networks_by_hand(kind, norm_eval):
    net = build(kind, norm_eval=norm_eval).double()
    net.train()
    image, expected = torch.rand(3, 3, 64, 64).double(), []
    x = net.maxpool(net.norm1(net.conv1(image)).relu())
    for name in net.res_layers:
        x = run_by_hand(kind, getattr(net, name), x)
        expected.append(x)
    assert_same_with_gradients(net(image), expected, list(net.parameters()), tolerance=1e-6)


@pytest.mark.parametrize("kind", ["SE", "A2", "GC", "AA"])
def test_plugins_work_as_in_mmdet(kind):
    net = build(kind, norm_eval=False)
    plain = ResNet(50, base_channels=16, norm_eval=False, **copy.deepcopy(KINDS[kind]))
    net.train()
    assert_same_levels(net, load_plain(plain, net), torch.randn(2, 3, 64, 96), tolerance=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_with_frozen_stages_every_trained_parameter_gets_a_gradient(kind):
    net, image = build(kind, frozen_stages=1), torch.randn(2, 3, 75, 97)
    net.train()
    found = gradients(net, image)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {name for name, grad in found.items() if grad is not None}
    assert not any(name.startswith(("conv1", "bn1", "layer1")) for name in trained)
    for block in net.modules():
        if hasattr(block, "with_cp"):
            block.with_cp = True
    torch.testing.assert_close(gradients(net, image), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mrla_mm.ComparatorResNet", "MRLAResNet"])
def test_arguments_of_the_networks(kind):
    chosen = [plugin("mrla_mm.A2", THIRD, blocks=(0, 2)), plugin("mrla_mm.SE", THIRD, blocks=(-1,))]
    net = build("", type=kind, plugins=[*chosen, plugin("mrla_mm.ECA", THIRD)])
    assert net.eval() is net
    found = [block.after_conv3_plugin_names for block in net.layer3]
    assert found == [["a2", "eca"], ["eca"], ["a2", "eca"], ["eca"], ["eca"], ["se", "eca"]]
    assert [i for i, block in enumerate(net.layer3) if hasattr(block, "a2")] == [0, 2]
    plain = ResNet(50, base_channels=16).state_dict().keys()
    for off in (None, False):
        assert build("", layer_attention=off).state_dict().keys() == plain
    assert type(build("", layer_attention="mrla_mm.DIA").layer1[0].mrla) is DIA
    with pytest.raises(InputError, match="MRLAResNet"):
        build("", layer_attention=dict(type="mrla_mm.KCLA"))
    with pytest.raises(InputError, match="depth=18"):
        build("RLA", depth=18)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_load_strictly(kind, tmp_path):
    plain = ResNet(50, base_channels=16).state_dict()
    torch.save(plain, tmp_path / "plain.pth")
    net = build(kind, init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "plain.pth")))
    if kind == "AA":
        with pytest.raises(InputError, match="conv2"):
            net.init_weights()
    else:
        net.init_weights()
        assert all(torch.equal(net.state_dict()[key], value) for key, value in plain.items())
