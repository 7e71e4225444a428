"""The networks: which blocks have what, values by hand, gradients with frozen stages, and plain weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mmdet.models import ResNet
from mmengine.registry import MODELS

from mrla_mm.backbones.conv_bn import MIN_NUMEL_TO_FOLD
from mrla_mm.errors import InputError

from ..backbones.common import assert_same_with_gradients, gradients


def plugin(kind, stages=(True,) * 4, **options):
    return dict(cfg=dict(type=kind, **options.pop("cfg", {})), stages=stages, position="after_conv3", **options)


THIRD = (False, False, True, False)
KINDS = {
    **{kind: dict(plugins=[plugin(kind)]) for kind in ("SE", "ECA", "CBAM", "A2", "BA")},
    "GC": dict(plugins=[plugin("ContextBlock", cfg=dict(ratio=1 / 4))]),
    "NL": dict(plugins=[plugin("NonLocal2d", THIRD, blocks=(-2,))]),
    "AA": dict(dcn=dict(type="AA"), stage_with_dcn=(False, True, True, True)),
    "DIA": dict(layer_attention=dict(type="DIA", reduction=4)),
    "RLA": dict(type="RLAResNet"),
    "RLA, out_hidden": dict(type="RLAResNet", out_hidden=True, plugins=[plugin("ECA")]),
}


def build(kind, **options):
    cfg = dict(dict(type="ComparatorResNet", depth=50, base_channels=16, zero_init_residual=False), **options)
    return MODELS.build(copy.deepcopy({**cfg, **KINDS[kind]}))


def block_by_hand(block, x):
    """Shortcut, and the outputs of the convolutions with norm and ReLU."""
    first = block.norm1(block.conv1(x)).relu()
    second = block.norm2(block.conv2(first)).relu()
    shortcut = x if block.downsample is None else block.downsample(x)
    return shortcut, [first, second, block.norm3(block.conv3(second))]


def bridged(stage, x, _):
    for block in stage:
        shortcut, (*earlier, out) = block_by_hand(block, x)
        x = (shortcut + block.ba(out, earlier)).relu()
    return x, None


def dense_and_implicit(stage, x, _):
    memory = None
    for block in stage:
        shortcut, (*_, out) = block_by_hand(block, x)
        out, memory = block.mrla(out, shortcut, memory)
        x = (shortcut + out).relu()
    return x, None


def recurrent(stage, x, hidden):
    """As the paper has it, by the concatenation of the map and the hidden state."""
    hidden = torch.zeros(x.shape[0], 32, *x.shape[2:]).to(x) if hidden is None else hidden
    shared = stage[0].mrla
    for block in stage:
        weight = torch.cat([block.conv1.weight, block.mrla.read.weight], 1)
        first = block.norm1(F.conv2d(torch.cat([x, hidden], 1), weight)).relu()
        second = block.norm2(block.conv2(first)).relu()
        y = block.norm3(block.conv3(second))
        x = (y + (x if block.downsample is None else block.downsample(x))).relu()
        if y.shape[2:] != hidden.shape[2:]:
            hidden = F.avg_pool2d(hidden, 2)
        if block.mrla.norm is not None:
            hidden = shared.recurrent(block.mrla.norm(hidden + shared.write(y)).tanh())
    return x, hidden


@pytest.mark.parametrize("norm_eval", [False, True])
@pytest.mark.parametrize(("kind", "run"), [("BA", bridged), ("DIA", dense_and_implicit), ("RLA", recurrent)])
def test_networks_by_hand(kind, run, norm_eval, monkeypatch):
    monkeypatch.setitem(MIN_NUMEL_TO_FOLD, "cpu", 0)
    net = build(kind, norm_eval=norm_eval, frozen_stages=-1).double().train()
    image, hidden, expected = torch.rand(3, 3, 64, 64).double(), None, []
    x = net.maxpool(net.norm1(net.conv1(image)).relu())
    for name in net.res_layers:
        x, hidden = run(getattr(net, name), x, hidden)
        expected.append(x)
    assert_same_with_gradients(net(image), expected, list(net.parameters()), tolerance=1e-6)


@pytest.mark.parametrize("norm_eval", [False, True])
@pytest.mark.parametrize("kind", ["SE", "A2", "GC", "AA"])
def test_plugins_work_as_in_mmdet(kind, norm_eval):
    net = build(kind, norm_eval=norm_eval).train()
    plain = ResNet(50, base_channels=16, norm_eval=norm_eval, **copy.deepcopy(KINDS[kind]))
    plain.load_state_dict(net.state_dict())
    plain.train()
    image = torch.randn(2, 3, 64, 96)
    for ours, theirs in zip(net(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_with_frozen_stages_every_trained_parameter_gets_a_gradient(kind):
    """And activation checkpointing changes none; on an image of odd size."""
    net, image = build(kind, frozen_stages=1).train(), torch.randn(2, 3, 75, 97)
    found = gradients(net, image)
    assert {name for name, p in net.named_parameters() if p.requires_grad and found[name] is None} == set()
    assert not any(p.requires_grad for p in net.layer1.parameters())
    for block in [block for name in net.res_layers for block in getattr(net, name)]:
        block.with_cp = True
    torch.testing.assert_close(gradients(net, image), found, rtol=1e-4, atol=1e-4)


def test_plugins_go_into_the_blocks_named():
    chosen = [plugin("A2", THIRD, blocks=(0, 2)), plugin("SE", THIRD, blocks=(-1,)), plugin("ECA", THIRD)]
    net = MODELS.build(dict(type="ComparatorResNet", depth=50, plugins=chosen))
    found = [block.after_conv3_plugin_names for block in net.layer3]
    assert found == [["a2", "eca"], ["eca"], ["a2", "eca"], ["eca"], ["eca"], ["se", "eca"]]
    assert [hasattr(block, "a2") for block in net.layer3] == [True, False, True, False, False, False]
    with pytest.raises(InputError, match="block 6"):
        MODELS.build(dict(type="ComparatorResNet", depth=50, plugins=[plugin("SE", THIRD, blocks=(1, 6))]))
    with pytest.raises(InputError, match="depth=18"):
        MODELS.build(dict(type="RLAResNet", depth=18))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "out_hidden" not in kind])
def test_plain_weights_load_strictly(kind, tmp_path):
    """All of them, except into AA, which has no plain 3x3 convolutions."""
    plain = ResNet(50, base_channels=16)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    net = build(kind, init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "plain.pth")))
    if kind == "AA":
        with pytest.raises(InputError, match="conv2"):
            net.init_weights()
        return
    net.init_weights()
    ours = net.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in plain.state_dict().items())
