"""What MRLAEfficientNet, MRLAPVTv2 and MRLACeiT hold alike against their plain hosts."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from mmdet.models.backbones import EfficientNet, PyramidVisionTransformerV2
from torch import nn

from mrla_mm.backbones import CeiT, MRLACeiT, MRLAEfficientNet, MRLAPVTv2

from .common import branches, count, gradients, wake


@dataclass
class Family:
    """A small member of a family: how to build it plain and with a variant, and what its first stages are called."""

    plain: Callable[..., nn.Module]
    build: Callable[..., nn.Module]
    head_channels: int
    frozen_prefixes: tuple[str, ...]  # parameters that frozen_stages=2 freezes

    def variant(self, name: str, **arguments: object) -> dict:
        return dict(type=name, head_channels=self.head_channels, **arguments)


SMALL_PVT = dict(embed_dims=16, num_layers=(2, 1, 2, 1), num_heads=(1, 2, 2, 4), drop_path_rate=0.0)
SMALL_CEIT = dict(
    arch=dict(embed_dims=32, num_layers=6, num_heads=2, feedforward_channels=64),
    img_size=64,
    stem_channels=8,
    out_type="featmap",
    out_indices=(1, 5),
)
FAMILIES = {
    "efficientnet": Family(
        plain=lambda **kw: EfficientNet("b1", out_indices=(1, 2, 4), **kw),
        build=lambda attention=None, **kw: MRLAEfficientNet("b1", attention, out_indices=(1, 2, 4), **kw),
        head_channels=8,
        frozen_prefixes=("layers.0.", "layers.1."),
    ),
    "pvtv2": Family(
        plain=lambda **kw: PyramidVisionTransformerV2(**{**SMALL_PVT, **kw}),
        build=lambda attention=None, **kw: MRLAPVTv2("b0", attention, **{**SMALL_PVT, **kw}),
        head_channels=16,
        frozen_prefixes=("layers.0.", "layers.1."),
    ),
    "ceit": Family(
        plain=lambda **kw: CeiT(**{**SMALL_CEIT, **kw}),
        build=lambda attention=None, **kw: MRLACeiT(
            layer_attention=attention, **{**SMALL_CEIT, "stage_blocks": 2, **kw}
        ),
        head_channels=16,
        frozen_prefixes=("cls_token", "pos_embed", "patch_embed.", "stem.", "layers.0.", "layers.1."),
    ),
}
VARIANTS = {
    "light": ("MRLALight", {}),
    "light-output": ("MRLALight", dict(previous="output")),
    "base": ("MRLABase", {}),
    "mla": ("MLA", {}),
    "linear": ("LinearRLA", {}),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    torch.manual_seed(0)
    return FAMILIES[request.param]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fresh_branches_leave_plain_weights_their_outputs(family, variant):
    name, arguments = VARIANTS[variant]
    backbone = family.build(family.variant(name, **arguments))
    backbone.init_weights()
    plain = family.plain()
    assert not plain.load_state_dict(backbone.state_dict(), strict=False).missing_keys
    image = torch.randn(2, 3, 65, 97)
    for mode in (True, False):
        plain.train(mode)
        backbone.train(mode)
        for ours, theirs in zip(backbone(image), plain(image), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    wake(backbone)
    assert not torch.allclose(backbone(image)[-1], plain(image)[-1], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_gives_the_same_gradients_with_the_same_drops(family, variant):
    name, arguments = VARIANTS[variant]
    cfg = family.variant(name, **arguments)
    kept = wake(family.build(cfg, drop_path_rate=0.3)).train()
    recomputed = family.build(cfg, drop_path_rate=0.3, with_cp=True).train()
    recomputed.load_state_dict(kept.state_dict())
    image = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    expected = gradients(kept, image)
    torch.manual_seed(1)
    actual = gradients(recomputed, image)
    for key, gradient in expected.items():
        assert gradient is not None, key
        torch.testing.assert_close(actual[key], gradient, msg=key)


def test_checkpointing_keeps_fewer_tensors(family):
    def saved(with_cp):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        backbone = family.build(with_cp=with_cp).train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone(torch.randn(2, 3, 64, 64))
        return total

    assert saved(True) < 0.6 * saved(False)


@pytest.mark.parametrize("variant", ["light", "base"])
def test_frozen_stages_cover_layer_attention_from_construction_and_leave_no_parameter_unused(family, variant):
    name, arguments = VARIANTS[variant]
    backbone = wake(family.build(family.variant(name, **arguments), frozen_stages=2, with_cp=True))
    frozen = {key for key, p in backbone.named_parameters() if not p.requires_grad}
    assert frozen == {key for key, _ in backbone.named_parameters() if key.startswith(family.frozen_prefixes)}
    assert any(".mrla." in key for key in frozen)
    assert backbone.train() is backbone
    assert all(not m.training for key, m in backbone.named_modules() if f"{key}.".startswith(family.frozen_prefixes))
    for key, gradient in gradients(backbone, torch.randn(2, 3, 64, 64)).items():
        assert (gradient is None) == (key in frozen), key


def test_zero_init_attention_can_be_turned_off(family):
    backbone = family.build(zero_init_attention=False)
    backbone.init_weights()
    assert all(torch.all(branch.norm.weight == 1) for branch in branches(backbone))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (dict(type="MRLAHeavy"), "MRLAHeavy.*MLA.*MRLABase"),
        (dict(type="MRLALight", head_channels=7), "head_channels=7 does not cut"),
        (dict(type="MRLALight", heads=4), "heads"),
        ("MRLALight", "layer_attention='MRLALight' must be a dict"),
    ],
)
def test_bad_attention_is_named(family, attention, message):
    with pytest.raises(ValueError, match=message):
        family.build(attention)


@pytest.mark.parametrize("variant", ["light", "base"])
def test_bf16_autocast_on_cpu_stays_close(family, variant):
    name, arguments = VARIANTS[variant]
    backbone = wake(family.build(family.variant(name, **arguments))).eval()
    image = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        exact = backbone(image)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = backbone(image)
    for level, reference in zip(rough, exact, strict=True):
        assert (level.float() - reference).norm() < 0.05 * reference.norm()


def test_channels_last_gives_the_same_values(family):
    backbone = wake(family.build()).double().eval()
    image = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    expected = backbone(image)
    actual = backbone.to(memory_format=torch.channels_last)(image.to(memory_format=torch.channels_last))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_memory_starts_empty_at_every_call(family):
    backbone = wake(family.build(family.variant("MRLABase"))).eval()
    first, second = torch.randn(2, 1, 3, 64, 96)
    expected = backbone(second)
    backbone(first)
    for ours, theirs in zip(backbone(second), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_layer_attention_adds_what_the_branches_hold(family):
    backbone, plain = family.build(), family.plain()
    assert count(backbone) - count(plain) == sum(count(branch) for branch in branches(backbone)) > 0
