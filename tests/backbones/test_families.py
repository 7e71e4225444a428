"""What all families of backbones have in common, against their plain hosts."""

import itertools
import pickle
from functools import partial

import pytest
import torch
from mmcv.cnn.bricks import DropPath
from mmengine.registry import MODELS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from measure import saved_bytes
from mrla_mm.attention import AttentionResidual
from mrla_mm.backbones import MRLAPVTv2, WithLayerAttention

from .common import (
    FAMILIES,
    PARAMETERS,
    VARIANTS,
    assert_same_levels,
    assert_same_with_gradients,
    branches,
    count,
    gradients,
    load_plain,
    randomize_zero_init,
    run_by_hand,
)

HEAD_CHANNELS = {"ResNet": 32, "EfficientNet": 8, "ViT": 16, "CeiT": 16, "PVTv2": 16}
MEMBERS = [("resnet18", variant) for variant in VARIANTS]
MEMBERS += itertools.product([name for name in FAMILIES if name != "resnet18"], ["light", "base"])


@pytest.fixture(params=FAMILIES)
def family(request):
    torch.manual_seed(0)
    return FAMILIES[request.param]


@pytest.mark.parametrize(("name", "size"), PARAMETERS)
def test_parameters(name, size, monkeypatch):
    for draw in ("kaiming_uniform_", "uniform_", "xavier_uniform_"):  # seconds for the large models
        monkeypatch.setattr(nn.init, draw, lambda tensor, *args, **kwargs: tensor)
    width, *expected = PARAMETERS[name, size]
    cfg = {"type": f"MRLA{name}", "depth" if name == "ResNet" else "arch": size}
    for kind, parameters in zip((None, "MRLALight", "MRLABase"), expected, strict=True):
        attention = kind and dict(type=kind, head_channels=HEAD_CHANNELS[name])
        if parameters:
            backbone = MODELS.build(dict(cfg, layer_attention=attention))
            assert count(backbone) + (width + 1) * 1000 == parameters


@pytest.mark.parametrize(("name", "head_channels"), HEAD_CHANNELS.items())
def test_the_root_registry_builds_the_light_variant_by_default(name, head_channels):
    sizes = dict(ResNet=dict(depth=50), ViT=dict(arch="deit-tiny"), CeiT=dict(arch="ceit-tiny"))
    for branch in branches(MODELS.build(dict(type=f"MRLA{name}", **sizes.get(name, {})))):
        attention = branch.attention
        assert type(attention).__name__ == "MRLALight" and attention.previous == "shortcut"
        assert attention.channels // attention.heads == head_channels


@pytest.mark.parametrize("off", [None, False])
def test_none_and_false_mean_plain_and_a_name_alone_is_a_variant(family, off):
    plain = family.plain()
    backbone = family.build(layer_attention=off)
    assert not branches(backbone)
    shapes = {key: tensor.shape for key, tensor in backbone.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match="mrla.attention.query"):
        backbone.load_state_dict(family.mrla().state_dict())
    named = pickle.loads(pickle.dumps(family.build(layer_attention="MRLABase")))
    assert {type(branch.attention).__name__ for branch in branches(named)} == {"MRLABase"}


@pytest.mark.parametrize(("name", "variant"), MEMBERS)
def test_the_branches_follow_the_plain_blocks_and_their_memory_is_that_of_the_stage(name, variant):
    torch.manual_seed(0)
    family = FAMILIES[name]
    backbone, plain = randomize_zero_init(family.mrla(variant)).double(), family.plain().double()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    load_plain(plain, backbone.eval())
    backbone(torch.randn(1, 3, 64, 64).double())  # leaves no memory for the next call
    image = torch.randn(2, 3, 48, 80, dtype=torch.float64, requires_grad=True)
    leaves = [image, *nn.ModuleList(branches(backbone)).parameters()]
    expected = run_by_hand(backbone, plain, image)
    assert_same_with_gradients(backbone(image), expected, leaves)


@pytest.mark.parametrize("training", [True, False])
def test_an_image_alone_has_half_the_gradients_of_that_image_twice(family, training):
    """torch's batch norm errs on a CPU where a batch of one is an unusual view of tokens."""
    backbone = randomize_zero_init(family.mrla()).double().train(training)
    image = torch.randn(1, 3, 48, 80, dtype=torch.float64)
    found = gradients(backbone, image)
    twice = gradients(backbone, torch.cat([image, image]))
    halves = {name: gradient / 2 for name, gradient in twice.items()}
    torch.testing.assert_close(found, halves, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["light", "base"])
def test_checkpointing_saves_fewer_tensors_and_gives_every_parameter_its_gradient(family, variant):
    options = {family.drop_path: 0.5}
    saving = randomize_zero_init(family.mrla(variant, **options)).double().train()
    recomputing = family.mrla(variant, with_cp=True, **options).double().train()
    recomputing.load_state_dict(saving.state_dict())
    image, found, saved = torch.randn(2, 3, 64, 64, dtype=torch.float64), [], []
    for backbone in (saving, recomputing):
        torch.manual_seed(1)
        found.append(gradients(backbone, image))
        saved.append(saved_bytes(partial(backbone, image), backbone))
    assert not [name for name, gradient in found[0].items() if gradient is None]
    torch.testing.assert_close(*found)
    assert saved[1] < 0.7 * saved[0]


@pytest.mark.parametrize("stages", [2, -1])
def test_frozen_stages_cover_layer_attention_from_construction(family, stages):
    backbone = randomize_zero_init(family.mrla(frozen_stages=stages, with_cp=True))
    prefixes = family.frozen if stages > 0 else ()
    names = {name for name, _ in backbone.named_parameters()}
    frozen = {name for name in names if not backbone.get_parameter(name).requires_grad}
    assert frozen == {name for name in names if name.startswith(prefixes)}
    assert any(".mrla." in name for name in frozen) == (stages > 0)
    assert backbone.train() is backbone
    modes = (_BatchNorm, nn.LayerNorm, DropPath, AttentionResidual)
    for name, module in backbone.named_modules():
        if isinstance(module, modes):
            assert module.training is not f"{name}.".startswith(prefixes), name
    found = gradients(backbone, torch.randn(2, 3, 64, 64))
    assert {name for name, gradient in found.items() if gradient is None} == frozen  # for DDP


NORMS = ["BatchNorm2d", "SyncBatchNorm", "GroupNorm", "LayerNorm"]
BIASED = dict(type="Constant", layer=NORMS, val=1, bias=0.1)
STARTS = {name: family.build for name, family in FAMILIES.items()}
STARTS["shufflenet"] = partial(WithLayerAttention, "mmpretrain.ShuffleNetV1", groups=1)
for kind in ("GN", "SyncBN"):
    norm_cfg = dict(type=kind, num_groups=2) if kind == "GN" else dict(type=kind)
    STARTS[f"resnet18, {kind}"] = partial(FAMILIES["resnet18"].build, norm_cfg=norm_cfg)


@pytest.mark.parametrize("name", STARTS)
def test_a_fresh_backbone_computes_what_the_plain_one_does(name):
    """Whatever the host's `init_cfg` does to norms."""
    options = {} if name in ("shufflenet", "pvtv2", "swin") else dict(init_cfg=[BIASED])
    backbone = STARTS[name](layer_attention="MRLALight", **options)
    plain = STARTS[name](layer_attention=None)
    backbone.init_weights()
    image = torch.randn(2, 3, 65, 97)
    for training in (True, False):
        backbone.train(training and "SyncBN" not in name)
        assert_same_levels(backbone, load_plain(plain, backbone), image, tolerance=0)
    randomize_zero_init(backbone)
    assert not torch.allclose(backbone(image)[-1], plain(image)[-1], atol=1e-3)


def test_the_identity_start_can_be_turned_off(family):
    for zero_init, weight in ((True, 0), (False, 1)):
        backbone = family.mrla(zero_init_attention=zero_init)
        backbone.init_weights()
        norms = [branch.norm for branch in branches(backbone)]
        assert all(torch.all(norm.weight == weight) for norm in norms)
        assert not any(torch.any(norm.bias) for norm in norms)


def test_pvtv2s_stages_drop_path_probabilities_start_and_sizes():
    backbone = MRLAPVTv2("b0", drop_path_rate=0.7)
    found = branches(backbone)
    assert [branch.attention.first_in_stage for branch in found] == [True, False] * 4
    assert isinstance(found[0].drop_path, nn.Identity)
    rates = [branch.drop_path.drop_prob for branch in found[1:]]
    assert rates == pytest.approx([0.1 * i for i in range(1, 8)])
    backbone.init_weights()  # which mmdet's leaves to weight files
    assert 0.01 < backbone.layers[0][1][0].attn.attn.out_proj.weight.std() < 0.03
    # an argument takes precedence over what the size says
    backbone = MRLAPVTv2("b5", None, embed_dims=8, num_layers=(1, 1, 1, 1))
    assert [len(blocks) for _, blocks, _ in backbone.layers] == [1] * 4
    assert backbone.layers[0][1][0].ffn.feedforward_channels == 4 * 8
