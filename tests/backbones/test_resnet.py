"""MRLAResNet against mmdet's ResNet: parameters, identity start, checkpointing, freezing and every ResNet option."""

import copy

import pytest
import torch
from mmdet.models import ResNet
from mmengine.registry import MODELS
from torch import nn

from measure import saved_bytes
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.backbones import MRLAResNet, normed_conv
from mrla_mm.ops import block_end

from .common import count, gradients, wake

VARIANTS = [
    dict(type="MRLALight", head_channels=16),
    dict(type="MRLALight", head_channels=16, previous="output"),
    dict(type="MRLABase", head_channels=16),
    dict(type="MLA", head_channels=16),
    dict(type="LinearRLA", head_channels=4),
]
VARIANT_IDS = ["light", "light-output", "base", "mla", "linear"]
SMALL = dict(depth=50, base_channels=16, norm_eval=False, zero_init_residual=False)


@pytest.mark.parametrize(
    ("depth", "variant", "expected"),
    [
        (50, None, 25_557_032),
        (50, "MRLALight", 25_738_452),
        (50, "MRLABase", 25_723_348),
        (101, None, 44_549_160),
        (101, "MRLALight", 44_939_646),
        (152, None, 60_192_808),
        (152, "MRLALight", 60_767_784),
    ],
)
def test_parameters_with_a_1000_class_head(depth, variant, expected):
    with torch.device("meta"):
        if variant is None:
            backbone = ResNet(depth)
        else:
            backbone = MODELS.build(dict(type="MRLAResNet", depth=depth, layer_attention=dict(type=variant)))
    assert count(backbone) + count(nn.Linear(2048, 1000)) == expected


def test_root_registry_builds_the_light_variant_by_default():
    backbone = MODELS.build(dict(type="MRLAResNet", depth=50))
    attention = backbone.layer1[0].mrla.attention
    assert type(attention).__name__ == "MRLALight"
    assert attention.heads == 256 // 32
    assert attention.previous == "shortcut"


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize("depth", [18, 50])
def test_fresh_branches_leave_resnet_weights_their_outputs(depth, variant):
    backbone = MRLAResNet(depth, variant, base_channels=16, zero_init_residual=False)
    backbone.init_weights()
    plain = ResNet(depth, base_channels=16)
    missing = plain.load_state_dict(backbone.state_dict(), strict=False).missing_keys
    assert not missing
    image = torch.randn(2, 3, 65, 97)
    for mode in (True, False):
        plain.train(mode)
        for ours, theirs in zip(backbone.train(mode)(image), plain(image), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    wake(backbone)
    assert not torch.allclose(backbone(image)[0], plain(image)[0], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_checkpointing_gives_the_same_gradients(variant):
    torch.manual_seed(0)
    kept = wake(MRLAResNet(layer_attention=variant, **SMALL))
    recomputed = MRLAResNet(layer_attention=variant, with_cp=True, **SMALL)
    recomputed.load_state_dict(kept.state_dict())
    image = torch.randn(2, 3, 64, 64)
    expected, actual = gradients(kept, image), gradients(recomputed, image)
    for name, gradient in expected.items():
        assert gradient is not None, name
        torch.testing.assert_close(actual[name], gradient, msg=name)
    assert expected["layer2.1.mrla.attention.value.weight"].abs().sum() > 0


def test_checkpointing_keeps_fewer_tensors():
    def saved(with_cp):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        backbone = MRLAResNet(with_cp=with_cp, **SMALL)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone(torch.randn(1, 3, 64, 64))
        return total

    assert saved(True) < 0.5 * saved(False)


@pytest.mark.parametrize("with_cp", [False, True])
def test_drop_path_drops_the_branch_alone(with_cp):
    backbone = wake(MRLAResNet(with_cp=with_cp, attention_drop_path=0.99, **{**SMALL, "norm_eval": True}))
    plain = ResNet(50, base_channels=16)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    image = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    dropped = backbone.train()(image)
    plain.train()
    for ours, theirs in zip(dropped, plain(image), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(backbone.eval()(image)[0], plain(image)[0])


@pytest.mark.parametrize("stages", [-1, 0, 1, 2, 3, 4])
def test_frozen_stages_cover_layer_attention_from_construction(stages):
    backbone = MRLAResNet(18, frozen_stages=stages, base_channels=16, layer_attention=VARIANTS[0])
    for index in range(1, 5):
        layer = getattr(backbone, f"layer{index}")
        frozen = index <= stages
        assert any(".mrla." in f".{name}." for name, _ in layer.named_parameters())
        assert all(p.requires_grad is not frozen for p in layer.parameters())
    backbone.train()
    assert backbone.layer1[0].mrla.norm.training is False  # norm_eval is mmdet's default


def test_every_trainable_parameter_gets_a_gradient_when_stages_are_frozen():
    for variant in VARIANTS:
        backbone = wake(MRLAResNet(layer_attention=variant, frozen_stages=1, with_cp=True, **SMALL))
        for name, gradient in gradients(backbone, torch.randn(2, 3, 64, 64)).items():
            assert (gradient is None) == name.startswith(("conv1", "bn1", "layer1")), (variant, name)


def test_branches_learn_although_the_norms_of_the_blocks_are_frozen():
    """Caffe-style configs freeze all norms; a branch behind a norm that stays at zero would be dead weight."""
    norm_cfg = dict(type="BN", requires_grad=False)
    backbone = MRLAResNet(layer_attention=VARIANTS[0], norm_cfg=norm_cfg, frozen_stages=1, **SMALL)
    found = gradients(backbone, torch.randn(2, 3, 64, 64))
    assert found["layer2.0.bn1.weight"] is None and found["layer1.0.mrla.norm.weight"] is None
    assert all(found[f"layer{stage}.0.mrla.norm.weight"].abs().max() > 0 for stage in (2, 3, 4))


OPTIONS = {
    "caffe": dict(style="caffe"),
    "deep_stem": dict(deep_stem=True, avg_down=True),
    "dilation": dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    "three_stages": dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,)),
    "out_indices": dict(out_indices=(1, 3)),
    "group_norm": dict(norm_cfg=dict(type="GN", num_groups=4)),
    "frozen_norm": dict(norm_cfg=dict(type="BN", requires_grad=False)),
    "in_channels": dict(in_channels=1),
    "stem_channels": dict(stem_channels=32),
    "plugins": dict(plugins=[dict(cfg=dict(type="ContextBlock", ratio=1 / 4), position="after_conv3")]),
    "dcn": dict(
        dcn=dict(type="DCN", deform_groups=1, fallback_on_stride=False), stage_with_dcn=(False, True, True, True)
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_resnet_options_work_as_in_mmdet(name):
    options = {**SMALL, **copy.deepcopy(OPTIONS[name])}
    backbone = MRLAResNet(layer_attention=VARIANTS[0], **copy.deepcopy(options)).eval()
    plain = ResNet(**options)
    plain.eval()
    plain.load_state_dict(backbone.state_dict(), strict=False)
    size = (96, 128) if name == "dcn" else (64, 96)  # compiled DCN takes no map smaller than its kernel
    image = torch.randn(1, options.get("in_channels", 3), *size)
    for ours, theirs in zip(backbone(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_zero_init_residual_reaches_our_blocks():
    backbone = MRLAResNet(50, base_channels=16, layer_attention=VARIANTS[0])
    backbone.init_weights()
    assert backbone.layer1[1].bn3.weight.abs().sum() == 0
    assert backbone.layer1[1].bn2.weight.abs().sum() > 0


def test_zero_init_attention_can_be_turned_off():
    backbone = MRLAResNet(18, base_channels=16, layer_attention=VARIANTS[0], zero_init_attention=False)
    backbone.init_weights()
    assert torch.all(backbone.layer1[0].mrla.norm.weight == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layer_attention=dict(type="MRLAHeavy")), "MRLAHeavy.*MLA.*MRLABase"),
        (dict(layer_attention=dict(type="ResNet")), "'ResNet' is no variant"),
        (dict(layer_attention=dict(type="MRLALight", head_channels=48)), "head_channels=48.*channels=256"),
        (dict(layer_attention=dict(type="MRLALight", heads=4)), "heads"),
        (dict(layer_attention="MRLALight"), "layer_attention='MRLALight' must be a dict"),
        (dict(layer_attention={}), "None is no variant"),
        (dict(attention_drop_path=1.5), "1.5"),
        (dict(norm_cfg=dict(type="IN")), "InstanceNorm2d has no weight"),
        (dict(depth=20), "depth=20 is unknown; use one of 18, 34, 50, 101, 152"),
        (dict(frozen_stages=5), "frozen_stages=5 must be a whole number from -1 to 4"),
        (dict(depth=34, dcn=dict(type="DCN"), stage_with_dcn=(False, True, True, True)), "dcn=.* needs bottleneck.*34"),
        (dict(depth=18, plugins=[dict(cfg=dict(type="ContextBlock"), position="after_conv1")]), "plugins=.* needs.*18"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MRLAResNet(**{"depth": 50, **options})


def test_a_registered_variant_of_a_user_works():
    from mrla_mm.attention import MRLALight

    @MODELS.register_module(name="HalvedLight")
    class HalvedLight(MRLALight):
        def forward(self, x, shortcut, memory=None):
            return super().forward(x / 2, shortcut, memory)

    try:
        backbone = MRLAResNet(18, dict(type="HalvedLight", head_channels=16), base_channels=16)
        assert type(backbone.layer3[1].mrla.attention) is HalvedLight
    finally:
        MODELS.module_dict.pop("HalvedLight")


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_bf16_autocast_on_cpu_stays_close(variant):
    torch.manual_seed(0)
    backbone = wake(MRLAResNet(layer_attention=variant, **SMALL)).eval()
    image = torch.randn(1, 3, 64, 64)
    exact = backbone(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = backbone(image)
    for level, reference in zip(rough, exact, strict=True):
        assert level.dtype == torch.bfloat16
        assert (level.float() - reference).norm() < 0.05 * reference.norm()


FUSED_END = dict(base_channels=16, norm_eval=True, zero_init_residual=False)


def build_drawn(depth=50, variant=VARIANTS[0], *, cls=MRLAResNet, **options):
    """Backbone in float64 and training mode whose norms and statistics are all drawn anew."""
    torch.manual_seed(0)
    backbone = cls(depth, variant, **{**FUSED_END, **options}).double().train()
    for norm in (module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.3, 0.8)
        nn.init.normal_(norm.bias, std=0.1)
        nn.init.normal_(norm.running_mean, std=0.1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return backbone


def fused_ends(module, monkeypatch, image=None):
    """How many blocks of a backbone, or whether a block, ran their end as one function."""
    seen = []
    with monkeypatch.context() as patch:
        for name in ("light_block_end", "base_block_end"):
            run = getattr(block_end, name)
            patch.setattr(block_end, name, lambda *args, run=run, **kwargs: seen.append(1) or run(*args, **kwargs))
        module(torch.randn(1, 3, 64, 64, dtype=torch.float64) if image is None else image)
    return len(seen)


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("variant", [VARIANTS[0], dict(VARIANTS[0], previous="none"), VARIANTS[2]], ids=str)
@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (50, 16)])
def test_fusing_the_end_of_a_block_changes_no_gradient(depth, blocks, variant, drop_path, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    backbone = build_drawn(depth, variant, attention_drop_path=drop_path)
    assert fused_ends(backbone, monkeypatch) == blocks
    image, found = torch.randn(2, 3, 64, 64, dtype=torch.float64), []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(LayerAttentionResidual, "can_end_block", lambda self, *args: False)
            assert fused_ends(backbone, monkeypatch) == 0
        torch.manual_seed(1)
        found.append(gradients(backbone, image))
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, msg=name)
        idle = drop_path or name.endswith(".0.mrla.attention.query.weight")  # one score alone is 1 whatever the query
        assert idle or expected.abs().max() > 0, name


@pytest.mark.parametrize(("variant", "ratio"), [(VARIANTS[0], 0.95), (VARIANTS[2], 1.25)], ids=["light", "base"])
def test_what_is_kept_for_backward(variant, ratio, monkeypatch):
    """Light keeps less than a plain ResNet, which keeps what goes into its norms; base keeps its values besides."""
    monkeypatch.setenv("MRLA_OPS", "folded")
    monkeypatch.setitem(normed_conv.LEAST_NUMBERS, "cpu", 0)
    image = torch.randn(2, 3, 256, 256)
    plain = ResNet(50, **FUSED_END)
    plain.train()
    ours = build_drawn(50, variant).float()
    kept = [saved_bytes(lambda model=model: sum(o.sum() for o in model(image)), model) for model in (ours, plain)]
    assert kept[0] < ratio * kept[1]


def listen(name):
    """Hang a hook on a module of the second block of the first stage."""
    return lambda backbone: backbone.layer1[1].get_submodule(name).register_forward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("options", "change", "blocks"),
    [
        ({}, None, 16),
        (dict(with_cp=True), None, 16),
        (dict(frozen_stages=2), None, 16),
        (dict(norm_cfg=dict(type="BN", requires_grad=False)), None, 16),
        (dict(variant=dict(VARIANTS[0], gated=False)), None, 16),
        (dict(norm_eval=False), None, 0),  # by the branch's own norm, as for GN
        (dict(norm_cfg=dict(type="GN", num_groups=4)), None, 0),
        (dict(variant=VARIANTS[1]), None, 0),
        (dict(variant=VARIANTS[2]), None, 16),
        (dict(variant=VARIANTS[2], with_cp=True), None, 16),
        (dict(variant=VARIANTS[2], frozen_stages=2), None, 16),
        (dict(variant=dict(VARIANTS[2], value="identity")), None, 0),
        (dict(variant=VARIANTS[3]), None, 0),
        (dict(variant=dict(VARIANTS[0], value="dwconv_gelu")), None, 0),
        (OPTIONS["plugins"], None, 16),
        ({}, listen("bn3"), 16),
        ({}, listen("relu"), 15),
        ({}, listen("mrla"), 15),
        ({}, listen("mrla.norm"), 15),
        ({}, listen("mrla.attention"), 15),
        (dict(variant=VARIANTS[2]), listen("mrla"), 15),
        ({}, lambda backbone: backbone.layer1[1].bn3.train(), 16),
        ({}, lambda backbone: setattr(backbone.layer1[1], "relu", nn.ReLU6()), 15),
        ({}, lambda backbone: setattr(backbone.layer1[1].mrla.attention, "forward", lambda x, *rest: (x, None)), 15),
    ],
)
def test_which_blocks_fuse_their_end(options, change, blocks, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    backbone = build_drawn(**copy.deepcopy(options))
    if change is not None:
        change(backbone)
    assert fused_ends(backbone, monkeypatch) == blocks
    monkeypatch.setenv("MRLA_OPS", "reference")
    assert fused_ends(backbone, monkeypatch) == 0


def test_a_compiler_is_left_to_see_every_operator_of_a_block(monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    torch.compiler.reset()
    block = build_drawn(18).layer1[1]
    x = torch.randn(1, 16, 8, 8, dtype=torch.float64)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert (fused_ends(block, monkeypatch, x), fused_ends(compiled, monkeypatch, x)) == (1, 0)
    torch.testing.assert_close(compiled(x)[0], block(x)[0])


def test_channels_last_gives_the_same_values():
    backbone = wake(MRLAResNet(layer_attention=VARIANTS[0], **SMALL)).double().eval()
    image = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    expected = backbone(image)
    actual = backbone.to(memory_format=torch.channels_last)(image.to(memory_format=torch.channels_last))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
