"""MRLAResNet and MRLAEfficientNet: mmdet's options, drop path, and what fusion changes."""

import copy
import re
from functools import partial

import pytest
import torch
from mmdet.models import ResNet
from mmdet.models.backbones import EfficientNet

from measure import saved_bytes
from mrla_mm.backbones import MRLAEfficientNet, MRLAResNet
from mrla_mm.errors import InputError

from .common import (
    assert_same_levels,
    load_plain,
    randomize,
    randomize_zero_init,
    run_by_hand,
)

LIGHT, BASE = (dict(type=name, head_channels=16) for name in ("MRLALight", "MRLABase"))
SMALL = dict(depth=50, base_channels=16, norm_eval=False, zero_init_residual=False)
OPTIONS = {
    "caffe": dict(style="caffe"),
    "deep_stem": dict(deep_stem=True, avg_down=True),
    "dilation": dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    "three_stages": dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,)),
    "group_norm": dict(norm_cfg=dict(type="GN", num_groups=4)),
    "stem": dict(in_channels=1, stem_channels=32),
    "plugins": dict(plugins=[dict(cfg=dict(type="ContextBlock", ratio=1), position="after_conv3")]),
    "dcn": dict(
        dcn=dict(type="DCN", fallback_on_stride=False), stage_with_dcn=(False, *[True] * 3)
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_resnet_options_work_as_in_mmdet(name):
    options = {**SMALL, **OPTIONS[name]}
    backbone = MRLAResNet(layer_attention=LIGHT, **copy.deepcopy(options)).train()
    plain = load_plain(ResNet(**options), backbone)
    size = (96, 128) if name == "dcn" else (64, 96)  # no map smaller than a compiled DCN's kernel
    assert_same_levels(backbone, plain, torch.randn(2, options.get("in_channels", 3), *size))


WRAPPERS = {
    "conv": ({}, "conv2"),
    "DCNv2": (dict(type="DCNv2"), "conv2.conv_offset"),  # inside the deformable convolution
}


@pytest.mark.parametrize(("dcn", "path"), WRAPPERS.values(), ids=WRAPPERS)
def test_dilation_of_each_block(dcn, path):
    options = dict(contract_dilation=True, base_channels=16)
    if dcn:
        options |= dict(dcn=dcn, stage_with_dcn=(True,) * 4)
    backbone = MRLAResNet(50, strides=(1, 2, 1, 1), dilations=(1, 1, 3, 4), **options)
    expected = {"layer1": [1] * 3, "layer3": [1, 3, 3, 3, 3, 3], "layer4": [2, 4, 4]}
    for name, dilations in expected.items():
        convs = [block.get_submodule(path) for block in getattr(backbone, name)]
        assert [conv.dilation for conv in convs] == [(each, each) for each in dilations]
        assert [conv.padding for conv in convs] == [(each, each) for each in dilations]


@torch.no_grad()
def test_stages_without_layer_attention_are_plain():
    options = dict(base_channels=16, norm_eval=True)
    backbone = randomize(MRLAResNet(50, BASE, stages="layer[13]", **options))
    backbone, plain = backbone.double().eval(), ResNet(50, **options).double()
    found = {name[:-5] for name, _ in backbone.named_modules() if name.endswith(".mrla")}
    depths = {"layer1": 3, "layer3": 6}
    assert found == {f"{stage}.{i}" for stage, depth in depths.items() for i in range(depth)}
    image = torch.randn(2, 3, 64, 96).double()
    expected = run_by_hand(backbone, load_plain(plain, backbone), image)
    torch.testing.assert_close(list(backbone(image)), expected)
    for wrong in ("layer", "layer5", "(", None):  # "layer" matches no name entirely
        with pytest.raises(InputError, match=re.escape(f"stages={wrong!r}")):
            MRLAResNet(50, BASE, stages=wrong, **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_attention", True),
        ("layer_attention", dict(head_channels=16)),  # without its type
        ("attention_drop_path", True),
        ("zero_init_attention", "no"),
        ("depth", 51),
    ],
)
def test_values_that_do_not_fit_are_named(key, value):
    with pytest.raises(InputError, match=re.escape(f"{key.removeprefix('attention_')}={value!r}")):
        MRLAResNet(**{"depth": 18, "base_channels": 16, key: value})


def test_zero_init_residual_reaches_our_blocks():
    backbone = MRLAResNet(50, LIGHT, base_channels=16)
    backbone.init_weights()
    assert backbone.layer1[1].bn3.weight.abs().sum() == 0
    assert backbone.layer1[1].bn2.weight.abs().sum() > 0


def test_drop_path_drops_the_branch_alone():
    backbone = MRLAResNet(layer_attention=LIGHT, attention_drop_path=0.99, **SMALL).train()
    plain = load_plain(ResNet(**SMALL), randomize_zero_init(backbone))
    image = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    assert_same_levels(backbone, plain, image)
    assert not torch.allclose(backbone.eval()(image)[0], plain(image)[0])


@pytest.mark.parametrize(
    ("attention", "folded", "ratio"),
    [(LIGHT, False, 1.36), (LIGHT, True, 1.08), (BASE, False, 1.56), (BASE, True, 1.25)],
    ids=str,
)
def test_what_is_saved_for_backward_with_frozen_statistics(attention, folded, ratio):
    options = dict(base_channels=32)
    ours = MRLAResNet(50, attention, efficient_conv_bn_eval=folded, **options)
    plain = ResNet(50, **options)
    image, saved = torch.randn(2, 3, 256, 256), []
    for net in (ours, plain):
        net.train()
        saved.append(saved_bytes(partial(net, image), net))
    assert saved[0] < ratio * saved[1]


def test_a_block_and_its_layer_attention_are_dropped_together():
    torch.manual_seed(0)
    options = dict(drop_path_rate=0.5, out_indices=(5,), norm_eval=True)
    backbone = randomize_zero_init(MRLAEfficientNet("b0", **options)).double().train()
    block = backbone.layers[5][3]
    assert block.drop_path.drop_prob == pytest.approx(0.5 * 14 / 15)  # linear in depth
    x = torch.randn(64, 192, 2, 3, dtype=torch.float64)
    (out,) = block(x)
    dropped = (out == x).flatten(1).all(1)
    assert 16 < dropped.sum() < 48

    residual = x
    for name in ("expand_conv", "depthwise_conv", "se", "linear_conv"):
        residual = getattr(block, name)(residual)
    after = x + residual / (1 - block.drop_path.drop_prob)
    attended = block.mrla.norm(block.mrla.attention(after, x)[0]) / (1 - block.drop_path.drop_prob)
    torch.testing.assert_close(out[~dropped], (after + attended)[~dropped])
    assert torch.equal(block.eval()(x)[0], block(x)[0])


GROUP_NORM = dict(type="GN", num_groups=4)
EFFICIENTNETS = [dict(arch="es", out_indices=(1, 3, 5)), dict(arch="em", out_indices=(2, 4))]
EFFICIENTNETS += [dict(norm_cfg=GROUP_NORM, out_indices=(0, 6)), dict(act_cfg=dict(type="ReLU"))]


@pytest.mark.parametrize("options", [*EFFICIENTNETS, dict(norm_eval=True)], ids=str)
def test_options_of_efficientnet_work_as_in_mmdet(options):
    backbone = MRLAEfficientNet(**options).train()
    plain = load_plain(EfficientNet(**options), backbone)
    assert_same_levels(backbone, plain, torch.randn(2, 3, 65, 33), tolerance=1e-4)
