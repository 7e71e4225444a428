"""MRLAEfficientNet: parameters, where layer attention stands, its drop path, and an independent transcription."""

import pytest
import torch
from mmdet.models.backbones import EfficientNet
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.backbones import MRLAEfficientNet
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights
from tests.attention import reference

from .common import assert_same_with_gradients, batch_norm, branches, count, wake

ARCHS = ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7")
# Plain, light and base with a 1000-class head. Table 1 of the paper: 5.3 M for B0 and 7.8 M for B1, all three of each;
# EfficientNet's own paper: 5.3, 7.8, 9.2, 12, 19, 30, 43 and 66 M (its 9.2 is 9.11 by its own code).
PARAMETERS = {
    "b0": (5_288_548, 5_300_902, 5_299_878),
    "b1": (7_794_184, 7_815_996, 7_814_188),
    "b2": (9_109_994, 9_133_726, 9_131_758),
    "b3": (12_233_232, 12_265_258, 12_262_602),
    "b4": (19_341_616, 19_389_818, 19_385_818),
    "b5": (30_389_784, 30_458_992, 30_453_248),
    "b6": (43_040_704, 43_132_524, 43_124_900),
    "b7": (66_347_960, 66_478_556, 66_467_708),
}


@pytest.mark.parametrize("arch", ARCHS)
def test_parameters_with_a_1000_class_head(arch):
    plain = EfficientNet(arch)
    head = (plain.out_channels + 1) * 1000
    backbones = [MRLAEfficientNet(arch, dict(type=name, head_channels=8)) for name in ("MRLALight", "MRLABase")]
    assert tuple(count(backbone) + head for backbone in (plain, *backbones)) == PARAMETERS[arch]


def test_the_paper_increments():
    for arch, millions in (("b0", 0.01), ("b1", 0.02)):
        plain, light, base = PARAMETERS[arch]
        assert round((light - plain) / 1e6, 2) == round((base - plain) / 1e6, 2) == millions


@pytest.mark.parametrize("arch", ["b0", "es", "em", "el"])
def test_layer_attention_follows_the_blocks_with_a_shortcut_and_only_those(arch):
    backbone, plain = MRLAEfficientNet(arch), EfficientNet(arch)
    seen = 0
    for layer, plain_layer in zip(backbone.layers[1:-1], plain.layers[1:-1], strict=True):
        fresh = True
        for block, plain_block in zip(layer, plain_layer, strict=True):
            shortcut = getattr(plain_block, "with_res_shortcut", getattr(plain_block, "with_residual", None))
            assert (block.mrla is not None) is shortcut
            if shortcut:
                assert block.mrla.attention.first_in_stage is fresh
                assert block.mrla.norm.eps == 1e-3  # that of the host's norms
                seen += 1
            fresh = not shortcut
    assert seen == len(branches(backbone)) > 3


def test_root_registry_builds_the_light_variant_of_b0_by_default():
    attention = MODELS.build(dict(type="MRLAEfficientNet")).layers[2][1].mrla.attention
    assert type(attention).__name__ == "MRLALight"
    assert attention.channels // attention.heads == 8


def parameters_of(attention):
    found = {"query": attention.query.weight, "key": attention.key.weight, "value": attention.value.weight}
    scale = getattr(attention, "history_scale", None)
    return found if scale is None else found | {"history_scale": scale}


@pytest.mark.parametrize(
    ("arch", "index", "channels", "size"),
    [("b1", 1, 32, (4, 4)), ("b1", 2, 16, (6, 14)), ("b0", 4, 40, (5, 7))],  # the last changes its width on the way
)
@pytest.mark.parametrize("kind", ["light", "base"])
def test_a_layer_agrees_with_plain_blocks_and_the_papers_equations(arch, index, channels, size, kind):
    torch.manual_seed(0)
    name = dict(light="MRLALight", base="MRLABase")[kind]
    backbone = MRLAEfficientNet(arch, dict(type=name, head_channels=8), out_indices=(index,))
    plain = EfficientNet(arch, out_indices=(index,))
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_var, module.weight, module.bias, module.running_mean):
                nn.init.uniform_(tensor, 0.5, 1.5)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    layer, plain_layer = backbone.double().eval().layers[index], plain.double().layers[index].eval()
    x = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)

    expected, xs, shortcuts, blocks = x, [], [], []
    for block, plain_block in zip(layer, plain_layer, strict=True):
        before, expected = expected, plain_block(expected)
        if not plain_block.with_res_shortcut:
            xs, shortcuts, blocks = [], [], []
            continue
        xs, shortcuts = [*xs, expected], [*shortcuts, before]
        blocks = [*blocks, parameters_of(block.mrla.attention)]
        if kind == "light":
            out = reference.light(xs[-1:], shortcuts[-1:], blocks[-1:], head_channels=8)[-1]
        else:
            out = reference.base(xs, blocks, head_channels=8)[-1]
        expected = expected + batch_norm(out, block.mrla.norm)
    leaves = [x, *(p for branch in branches(layer) for p in branch.parameters())]
    assert_same_with_gradients(layer(x), expected, leaves)


def test_a_block_and_its_layer_attention_are_dropped_together():
    torch.manual_seed(0)
    backbone = wake(MRLAEfficientNet("b0", drop_path_rate=0.5, out_indices=(5,), norm_eval=True)).double().train()
    block = backbone.layers[5][3]
    assert block.drop_path_rate == pytest.approx(0.5 * 14 / 15)  # the host's rule: linear in depth
    x = torch.randn(64, 192, 2, 3, dtype=torch.float64)
    out, _ = block(x)
    dropped = (out == x).flatten(1).all(1)
    assert 16 < dropped.sum() < 48

    residual = x
    for name in ("expand_conv", "depthwise_conv", "se", "linear_conv"):
        residual = getattr(block, name)(residual)
    after = x + residual / (1 - block.drop_path_rate)
    attended = block.mrla.norm(block.mrla.attention(after, x)[0]) / (1 - block.drop_path_rate)
    torch.testing.assert_close(out[~dropped], (after + attended)[~dropped])
    assert torch.equal(block.eval()(x)[0], block(x)[0])


def test_drop_path_is_of_the_inputs_type():
    block = MRLAEfficientNet("b0", drop_path_rate=0.5, out_indices=(2,)).train().layers[2][1]
    assert block.draw(torch.zeros(4, 24, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        dict(arch="es", out_indices=(1, 3, 5)),
        dict(arch="em", out_indices=(2, 4)),
        dict(conv_cfg=None),
        dict(norm_cfg=dict(type="GN", num_groups=4)),
        dict(norm_cfg=dict(type="BN", requires_grad=False)),
        dict(act_cfg=dict(type="ReLU")),
        dict(out_indices=(0, 6)),
        dict(out_indices=(3,)),
    ],
    ids=str,
)
def test_host_options_work_as_in_mmdet(options):
    backbone, plain = MRLAEfficientNet(**options).eval(), EfficientNet(**options)
    plain.eval()
    plain.load_state_dict(backbone.state_dict(), strict=False)
    image = torch.randn(1, 3, 65, 33)
    for ours, theirs in zip(backbone(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_branches_learn_although_the_norms_of_the_blocks_are_frozen():
    """A branch behind a norm that stays at zero would be dead weight; frozen stages freeze it with the block."""
    norm_cfg = dict(type="BN", requires_grad=False)
    backbone = MRLAEfficientNet("b0", norm_cfg=norm_cfg, out_indices=(2, 3), frozen_stages=3).train()
    sum((level**2).mean() for level in backbone(torch.randn(2, 3, 64, 64))).backward()
    assert backbone.layers[2][1].mrla.norm.weight.grad is None
    assert backbone.layers[3][1].mrla.norm.weight.grad.abs().max() > 0
    assert backbone.layers[3][1].linear_conv.bn.weight.grad is None


@pytest.mark.parametrize("norm_type", ["BN", "SyncBN"])
def test_norm_eval_keeps_every_norm_in_evaluation(norm_type):
    backbone = MRLAEfficientNet("b0", norm_eval=True, norm_cfg=dict(type=norm_type), out_indices=(2,)).train()
    norms = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert norms and not any(m.training for m in norms)
    assert backbone.layers[2][1].mrla.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="b9"), "arch='b9' must be one of 'b0', 'b1'"),
        (dict(frozen_stages=6, out_indices=(3,)), "frozen_stages=6.*4 stages"),
        (dict(frozen_stages=8), "frozen_stages"),
        (dict(out_indices=(7,)), "out_indices"),
        (dict(layer_attention=dict(type="MRLALight", head_channels=16)), "head_channels=16.*channels=24"),
        (dict(norm_cfg=dict(type="IN")), "InstanceNorm2d has no weight"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MRLAEfficientNet(**options)


def test_a_classifiers_file_loads_though_a_detector_builds_fewer_layers(tmp_path):
    """The last convolution, which no detector uses, is dropped knowingly; the file of another size is still refused."""
    path = tmp_path / "b0.pth"
    torch.save(MRLAEfficientNet("b0").state_dict(), path)
    report = load_weights(MRLAEfficientNet("b0", out_indices=(3, 4, 5)), path)
    assert report.unused and all(key.startswith("layers.6.") for key in report.unused)
    assert not report.missing and not report.unexpected
    with pytest.raises(InputError, match="do not fit"):
        load_weights(MRLAEfficientNet("b1", out_indices=(3, 4, 5)), path)
