"""MRLAResNet: mmdet's options, drop path, variants of a user's own, and what fusion changes (memory, no number)."""

import copy

import pytest
import torch
from mmdet.models import ResNet
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention import MRLABase, MRLALight
from mrla_mm.backbones import MRLAResNet

from .common import assert_same_with_gradients, gradients, randomize, randomize_zero_init, resnet_by_hand, saved_bytes

LIGHT, BASE = (dict(type=name, head_channels=16) for name in ("MRLALight", "MRLABase"))
SMALL = dict(depth=50, base_channels=16, norm_eval=False, zero_init_residual=False)
OPTIONS = {
    "caffe": dict(style="caffe"),
    "deep_stem": dict(deep_stem=True, avg_down=True),
    "dilation": dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    "three_stages": dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,)),
    "out_indices": dict(out_indices=(1, 3)),
    "group_norm": dict(norm_cfg=dict(type="GN", num_groups=4)),
    "in_channels": dict(in_channels=1),
    "stem_channels": dict(stem_channels=32),
    "plugins": dict(plugins=[dict(cfg=dict(type="ContextBlock", ratio=1 / 4), position="after_conv3")]),
    "dcn": dict(
        dcn=dict(type="DCN", deform_groups=1, fallback_on_stride=False), stage_with_dcn=(False, True, True, True)
    ),
}


@pytest.mark.parametrize("norm_eval", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_resnet_options_work_as_in_mmdet(name, norm_eval):
    options = {**SMALL, **OPTIONS[name], "norm_eval": norm_eval}
    backbone, plain = MRLAResNet(layer_attention=LIGHT, **copy.deepcopy(options)), ResNet(**options)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    plain.train()
    size = (96, 128) if name == "dcn" else (64, 96)  # compiled DCN takes no map smaller than its kernel
    image = torch.randn(2, options.get("in_channels", 3), *size)
    for ours, theirs in zip(backbone.train()(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_zero_init_residual_reaches_our_blocks():
    backbone = MRLAResNet(50, LIGHT, base_channels=16)
    backbone.init_weights()
    assert backbone.layer1[1].bn3.weight.abs().sum() == 0
    assert backbone.layer1[1].bn2.weight.abs().sum() > 0


@pytest.mark.parametrize("norm_eval", [False, True])
def test_drop_path_drops_the_branch_alone(norm_eval):
    options = {**SMALL, "norm_eval": norm_eval}
    backbone = randomize_zero_init(MRLAResNet(layer_attention=LIGHT, attention_drop_path=0.99, **options))
    plain = ResNet(**options)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    plain.train()
    image = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    for ours, theirs in zip(backbone.train()(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(backbone.eval()(image)[0], plain(image)[0])


@pytest.mark.parametrize("stages", [-1, 0, 1, 4])
def test_frozen_stages(stages):
    backbone = MRLAResNet(18, LIGHT, base_channels=16, frozen_stages=stages)
    assert all(p.requires_grad is (stages < 0) for p in backbone.conv1.parameters())
    for index in range(1, 5):
        layer = getattr(backbone.train(), f"layer{index}")
        assert all(p.requires_grad is (index > stages) for p in layer.parameters())
        assert layer.training is (index > stages) and not layer[0].mrla.norm.training  # norm_eval is mmdet's default


def attend(x, shortcut):
    return torch.tanh(x) - shortcut / 2


class Own(nn.Module):
    """A variant that has nothing of ours."""

    def __init__(self, channels, first_in_stage):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x, shortcut, memory=None):
        return self.scale * attend(x, shortcut), memory


class OwnForward(MRLALight):
    def forward(self, x, shortcut, memory=None):
        return attend(x, shortcut), memory


class LightOfTwice(MRLALight):
    def project_value(self, x):
        return 2 * super().project_value(x)


class BaseOfTwice(MRLABase):
    def project_value(self, x):
        return 2 * super().project_value(x)


@pytest.fixture
def registered():
    """Register the user's variants for a test, `Own` in mmdet's registry, `OwnForward` in the root's."""
    MMDET_MODELS.register_module(module=Own)
    MODELS.register_module(module=OwnForward)
    yield
    MMDET_MODELS.module_dict.pop("Own")
    MODELS.module_dict.pop("OwnForward")


def build_pair(attention, mode):
    """MRLAResNet in float64 with a variant and the plain one of its weights, in a mode of training or evaluation."""
    torch.manual_seed(0)
    options = {**SMALL, "depth": 18, "norm_eval": mode == "frozen"}
    backbone = randomize_zero_init(MRLAResNet(layer_attention=attention, **options)).double()
    for norm in (module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean, std=0.3)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    plain = ResNet(**options).double()
    plain.load_state_dict(backbone.state_dict(), strict=False)
    plain.train(mode != "eval")
    return backbone.train(mode != "eval"), plain


@pytest.mark.parametrize("mode", ["train", "frozen", "eval"])
@pytest.mark.parametrize(
    "attention",
    [
        dict(type="mmdet.Own"),
        dict(type="Own", _scope_="mmdet"),
        dict(type=Own),
        dict(type="OwnForward", head_channels=16),
        dict(type=OwnForward, head_channels=16),
    ],
    ids=["scoped", "scope", "class", "derived", "derived class"],
)
def test_a_variant_of_a_users_own_works(attention, mode, registered):
    backbone, plain = build_pair(attention, mode)
    image = torch.randn(2, 3, 64, 96, dtype=torch.float64, requires_grad=True)

    def by_hand(mrla, x, shortcut, memory):
        return x + mrla.norm(attend(x, shortcut)), None

    actual, expected = list(backbone(image)), resnet_by_hand(backbone, plain, image, by_hand)
    assert_same_with_gradients(actual, expected, [image, *(backbone.layer2[1].mrla.norm.parameters())])


@pytest.mark.parametrize("mode", ["train", "frozen", "eval"])
@pytest.mark.parametrize("twice", [LightOfTwice, BaseOfTwice])
def test_an_overridden_value_is_used(twice, mode):
    backbone, _ = build_pair(dict(type=twice, head_channels=16), mode)
    ours, _ = build_pair(dict(type=twice.__base__, head_channels=16), mode)
    state = backbone.state_dict()
    ours.load_state_dict({k: 2 * v if k.endswith("attention.value.weight") else v for k, v in state.items()})
    image = torch.randn(2, 3, 64, 96, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(list(backbone(image)), list(ours(image)), [image])


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("attention", [LIGHT, dict(LIGHT, previous="none"), BASE], ids=["light", "none", "base"])
@pytest.mark.parametrize("depth", [18, 50])
def test_the_fused_and_the_naive_path_have_the_same_gradients(depth, attention, drop_path, monkeypatch):
    options = dict(depth=depth, base_channels=16, attention_drop_path=drop_path)
    backbone = randomize(MRLAResNet(layer_attention=attention, **options)).double().train()
    image, found = torch.randn(2, 3, 64, 64, dtype=torch.float64), {}
    for path in ("fused", "naive"):
        monkeypatch.setenv("MRLA_OPS", path)
        torch.manual_seed(1)
        found[path] = gradients(backbone, image)
    for name, expected in found["naive"].items():
        torch.testing.assert_close(found["fused"][name], expected, msg=name)


@pytest.mark.parametrize(("attention", "ratio"), [(LIGHT, 0.95), (BASE, 1.25)], ids=["light", "base"])
def test_what_is_saved_for_backward_with_frozen_statistics(attention, ratio, monkeypatch):
    """Light saves less than a plain ResNet, which saves the inputs of its norms; base saves its values besides."""
    monkeypatch.setenv("MRLA_OPS", "fused")
    image, plain = torch.randn(2, 3, 256, 256), ResNet(50, base_channels=32)
    plain.train()
    ours = MRLAResNet(50, attention, base_channels=32).train()
    assert saved_bytes(ours, image) < ratio * saved_bytes(plain, image)
