"""MRLAViT against mmpretrain's VisionTransformer: parameters, identity start, sizes, checkpointing, freezing."""

import re

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS, init_default_scope
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer
from torch import nn

from mrla_mm.attention import TokenAttentionResidual
from mrla_mm.backbones import MRLAViT, ViT
from mrla_mm.errors import InputError

TINY = dict(embed_dims=32, num_layers=6, num_heads=2, feedforward_channels=48)
SMALL = dict(arch=TINY, img_size=64, patch_size=16, stage_blocks=2)
VARIANTS = [
    dict(type="MRLALight", head_channels=16),
    dict(type="MRLALight", head_channels=16, previous="output"),
    dict(type="MRLABase", head_channels=16),
    dict(type="MLA", head_channels=16),
    dict(type="LinearRLA", head_channels=4),
]
VARIANT_IDS = ["light", "light-output", "base", "mla", "linear"]


def count(module):
    return sum(p.numel() for p in module.parameters())


def branches(backbone):
    return [module for module in backbone.modules() if isinstance(module, TokenAttentionResidual)]


def randomise(backbone, seed=0):
    """Give every parameter a value of its own, the class token and the layer attention's norms too."""
    torch.manual_seed(seed)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return backbone


def gradients(backbone, image):
    backbone.zero_grad()
    sum((level**2).sum() for level in backbone(image)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in backbone.named_parameters()}


@pytest.mark.parametrize(
    ("arch", "variant", "expected"),
    [
        ("deit-tiny", None, 5_717_416),
        ("deit-tiny", "MRLALight", 5_749_792),
        ("deit-tiny", "MRLABase", 5_742_880),
        ("deit-small", None, 22_050_664),
        ("deit-small", "MRLALight", 22_115_296),
        ("deit-base", None, 86_567_656),
        ("deit-base", "MRLALight", 86_696_800),
    ],
)
def test_parameters_with_a_1000_class_head(arch, variant, expected):
    """MRLA-base lacks light's lambda and history norm: 3 * 192 fewer in each of the 12 blocks."""
    with torch.device("meta"):
        if variant is None:
            backbone = MODELS.build(dict(type="ViT", arch=arch))
        else:
            backbone = MODELS.build(dict(type="MRLAViT", arch=arch, layer_attention=dict(type=variant)))
        assert count(backbone) + count(nn.Linear(backbone.embed_dims, 1000)) == expected


def test_the_default_is_light_in_three_stages_of_four():
    with torch.device("meta"):
        backbone = MODELS.build(dict(type="MRLAViT", arch="deit-tiny"))
    assert [type(branch.attention).__name__ for branch in branches(backbone)] == ["MRLALight"] * 12
    assert {branch.attention.heads for branch in branches(backbone)} == {192 // 16}
    assert [branch.attention.first_in_stage for branch in branches(backbone)] == [True, False, False, False] * 3


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize("size", [(64, 64), (48, 112), (50, 33)])
def test_fresh_branches_leave_vit_weights_their_outputs(variant, size):
    plain = randomise(VisionTransformer(TINY, img_size=64, out_type="raw", out_indices=[2, 5]))
    plain.eval()
    backbone = MRLAViT(layer_attention=variant, out_type="raw", out_indices=(2, -1), **SMALL).eval()
    backbone.init_weights()
    result = backbone.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".mrla." in name for name in result.missing_keys)
    image = torch.randn(2, 3, *size)
    expected = plain(image)
    for ours, theirs in zip(backbone(image), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for branch in branches(backbone):
        nn.init.ones_(branch.norm.weight)
    assert not torch.allclose(backbone(image)[1], expected[1], atol=1e-2)


def test_distilled_weights_keep_their_outputs_and_both_tokens_come_out():
    plain = randomise(DistilledVisionTransformer(TINY, img_size=64))
    plain.eval()
    backbone = MRLAViT(with_dist_token=True, **SMALL).eval()
    assert not backbone.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    assert {branch.extra_tokens for branch in branches(backbone)} == {2}
    image = torch.randn(2, 3, 80, 48)
    (ours,), (theirs,) = backbone(image), plain(image)
    assert len(ours) == 2
    for token, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(token, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours[0], ours[1])


def test_tokens_are_initialised_and_pretrained_ones_kept(tmp_path):
    backbone = MRLAViT(with_dist_token=True, **SMALL)
    backbone.init_weights()
    for token in (backbone.cls_token, backbone.dist_token):
        assert 0.01 < token.std() < 0.03
    path = tmp_path / "weights.pth"
    torch.save(dict(state_dict=randomise(backbone).state_dict()), path)
    loaded = MRLAViT(with_dist_token=True, init_cfg=dict(type="Pretrained", checkpoint=str(path)), **SMALL)
    loaded.init_weights()
    for name, tensor in backbone.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, msg=name)


def timm_deit(state, image, heads):
    """DeiT in timm's layout and step by step: positions for the image's own grid, blocks, class token, head."""
    patch = state["patch_embed.proj.weight"].shape[-1]
    x = F.conv2d(image, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
    x = x + state["pos_embed"]
    width = x.shape[-1]

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    for block in (f"blocks.{index}" for index in range(TINY["num_layers"])):
        q, k, v = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1) / (width // heads) ** 0.5).softmax(-1)
        x = x + linear(f"{block}.attn.proj", (weights @ v).transpose(1, 2).flatten(2))
        x = x + linear(f"{block}.mlp.fc2", F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x))))
    return norm("norm", x)[:, 0]


TIMM_NAMES = [
    (r"^patch_embed\.projection", "patch_embed.proj"),
    (r"^ln1", "norm"),
    (r"^layers", "blocks"),
    (r"\.ln([12])\.", r".norm\1."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
]


def test_plain_weights_in_timms_layout_classify_as_they_do_in_timm():
    backbone = MRLAViT(**SMALL).eval()
    own = randomise(ViT(TINY, img_size=64), seed=3).state_dict()
    assert not backbone.load_state_dict(own, strict=False).unexpected_keys
    timm = {}
    for name, tensor in own.items():
        for ours, theirs in TIMM_NAMES:
            name = re.sub(ours, theirs, name)
        timm[name] = tensor
    image = torch.randn(2, 3, 64, 64)
    (ours,) = backbone(image)
    torch.testing.assert_close(ours, timm_deit(timm, image, TINY["num_heads"]), atol=1e-5, rtol=1e-5)


def test_the_history_is_what_the_block_took_in():
    """With the gated value silenced, a block adds lambda times its own normed input, to patches alone."""
    backbone = randomise(MRLAViT(out_type="raw", out_indices=(2, 3), final_norm=False, **SMALL)).eval()
    for branch in branches(backbone):
        nn.init.zeros_(branch.norm.weight)
        nn.init.zeros_(branch.norm.bias)
    before, after = backbone(torch.randn(2, 3, 48, 80))
    layer = backbone.layers[3]
    expected = layer(before)
    expected[:, 1:] += layer.mrla.attention.history_scale * layer.mrla.history_norm(before)[:, 1:]
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("out_type", ["raw", "cls_token", "featmap", "avg_featmap"])
@pytest.mark.parametrize("tokens", ["class", "class and distillation", "none"])
def test_output_shapes(out_type, tokens):
    options = dict(with_cls_token=tokens != "none", with_dist_token="dist" in tokens, out_type=out_type)
    if tokens == "none" and out_type == "cls_token":
        with pytest.raises(ValueError, match="with_cls_token"):
            MRLAViT(**options, **SMALL)
        return
    backbone = MRLAViT(out_indices=(1, 5), **options, **SMALL)
    extra = {"class": 1, "class and distillation": 2, "none": 0}[tokens]
    expected = {"raw": (2, extra + 3 * 7, 32), "cls_token": (2, 32), "featmap": (2, 32, 3, 7), "avg_featmap": (2, 32)}
    outs = backbone(torch.randn(2, 3, 48, 112))
    assert len(outs) == 2
    for out in outs:
        for tensor in out if isinstance(out, tuple) else (out,):
            assert tuple(tensor.shape) == expected[out_type]


def test_a_feature_map_has_the_place_of_its_patches():
    """A change in one patch of the image changes the first block's own patch most."""
    backbone = randomise(MRLAViT(out_type="featmap", out_indices=0, **SMALL)).eval()
    image = torch.randn(1, 3, 48, 112)
    changed = image.clone()
    changed[:, :, 16:32, 80:96] += 5
    difference = (backbone(changed)[0] - backbone(image)[0]).abs().sum(1)[0]
    assert divmod(int(difference.argmax()), 7) == (1, 5)


def test_positions_are_interpolated_to_the_grid():
    backbone = MRLAViT(out_type="featmap", **SMALL)
    grid = torch.arange(4.0)
    positions = (grid[:, None] * 4 + grid)[..., None].expand(4, 4, 32).reshape(1, 16, 32)
    with torch.no_grad():
        backbone.pos_embed.copy_(torch.cat([torch.full((1, 1, 32), -7.0), positions], dim=1))
        backbone.patch_embed.projection.weight.zero_()
        backbone.patch_embed.projection.bias.zero_()
    tokens, size = backbone.embed(torch.zeros(1, 3, 64, 128))
    assert size == (4, 8)
    assert torch.all(tokens[0, 0] == -7)
    laid_out = tokens[0, 1:, 0].reshape(4, 8)
    torch.testing.assert_close(laid_out.mean(1), 4 * grid + 1.5)
    assert (laid_out.diff(dim=1) > 0).all()


def test_memory_lives_for_a_stage():
    """With a second stage of its own, a block sees nothing of the first stage's values."""
    options = dict(SMALL, arch=dict(TINY, num_layers=2), layer_attention=VARIANTS[2], out_type="featmap")
    joined = randomise(MRLAViT(**{**options, "stage_blocks": 2}))
    apart = MRLAViT(**{**options, "stage_blocks": (1, 1)})
    apart.load_state_dict(joined.state_dict())
    image = torch.randn(2, 3, 64, 64)
    assert not torch.allclose(joined(image)[0], apart(image)[0], atol=1e-3)
    assert gradients(apart, image)["layers.1.mrla.attention.query.weight"].abs().max() == 0  # one layer to choose from
    assert gradients(joined, image)["layers.1.mrla.attention.query.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("stage_blocks", "starts"), [(4, {0, 4}), (1, {0, 1, 2, 3, 4, 5}), (9, {0}), ((1, 3, 2), {0, 1, 4}), ([6], {0})]
)
def test_stages(stage_blocks, starts):
    backbone = MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})
    firsts = {index for index, branch in enumerate(branches(backbone)) if branch.attention.first_in_stage}
    assert firsts == starts == backbone.starts


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.5])
@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_checkpointing_gives_the_same_gradients(variant, drop_path_rate):
    options = dict(SMALL, layer_attention=variant, out_type="featmap", drop_path_rate=drop_path_rate)
    kept = randomise(MRLAViT(**options))
    recomputed = MRLAViT(with_cp=True, **options)
    recomputed.load_state_dict(kept.state_dict())
    image = torch.randn(2, 3, 48, 64)
    results = []
    for backbone in (kept, recomputed):
        torch.manual_seed(1)
        results.append(gradients(backbone.train(), image))
    for name, gradient in results[0].items():
        assert gradient is not None, name
        torch.testing.assert_close(results[1][name], gradient, msg=name)
    assert results[0]["layers.0.mrla.attention.value.weight"].abs().sum() > 0


def test_checkpointing_keeps_fewer_tensors():
    def saved(with_cp):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        backbone = MRLAViT(with_cp=with_cp, **SMALL)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone(torch.randn(1, 3, 64, 64))
        return total

    assert saved(True) < 0.5 * saved(False)


def test_drop_path_is_the_blocks_own():
    backbone = MRLAViT(drop_path_rate=0.5, **SMALL)
    for layer in backbone.layers[1:]:
        assert layer.mrla.drop_path.drop_prob == pytest.approx(layer.attn.out_drop.drop_prob)
    assert backbone.layers[-1].mrla.drop_path.drop_prob == pytest.approx(0.5)
    assert isinstance(backbone.layers[0].mrla.drop_path, nn.Identity)


@pytest.mark.parametrize("size", [(64, 64), (48, 112)])
@pytest.mark.parametrize("dist", [False, True])
def test_the_plain_one_computes_what_mmpretrains_does(dist, size):
    host = (DistilledVisionTransformer if dist else VisionTransformer)(TINY, img_size=64, out_indices=[1, 5])
    ours = ViT(TINY, img_size=64, out_indices=(1, -1), with_dist_token=dist).eval()
    ours.load_state_dict(randomise(host).state_dict())
    host.eval()
    image = torch.randn(2, 3, *size)
    for level, wanted in zip(ours(image), host(image), strict=True):
        torch.testing.assert_close(level, wanted)


@pytest.mark.parametrize("stages", [-1, 0, 2, 6])
def test_frozen_stages_cover_layer_attention_from_construction(stages):
    backbone = MRLAViT(frozen_stages=stages, with_dist_token=True, drop_path_rate=0.5, **SMALL)
    for _ in range(2):
        for index, layer in enumerate(backbone.layers):
            assert all(p.requires_grad is (index >= stages) for p in layer.parameters())
        embedding = [backbone.cls_token, backbone.dist_token, backbone.pos_embed, *backbone.patch_embed.parameters()]
        assert all(p.requires_grad is (stages < 0) for p in embedding)
        assert all(p.requires_grad is (stages < 6) for p in backbone.ln1.parameters())
        backbone.train()
    assert [layer.mrla.training for layer in backbone.layers] == [index >= stages for index in range(6)]


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_every_trainable_parameter_gets_a_gradient_when_blocks_are_frozen(variant):
    backbone = randomise(
        MRLAViT(layer_attention=variant, frozen_stages=2, with_cp=True, out_type="featmap", **SMALL)
    ).train()
    frozen = ("cls_token", "pos_embed", "patch_embed", "layers.0.", "layers.1.")
    for name, gradient in gradients(backbone, torch.randn(2, 3, 64, 64)).items():
        assert (gradient is None) == name.startswith(frozen), name


def test_depths_for_layer_decay():
    backbone = MRLAViT(with_dist_token=True, **SMALL)
    depths = {
        name: backbone.get_layer_depth(f"backbone.{name}", "backbone.") for name, _ in backbone.named_parameters()
    }
    assert {total for _, total in depths.values()} == {6 + 2}
    for name in ("cls_token", "dist_token", "pos_embed", "patch_embed.projection.weight"):
        assert depths[name][0] == 0
    assert depths["layers.0.mrla.norm.weight"][0] == depths["layers.0.ln1.weight"][0] == 1
    assert depths["layers.5.mrla.attention.value.weight"][0] == 6
    assert depths["ln1.weight"][0] == backbone.get_layer_depth("bbox_head.fc.weight", "backbone.")[0] == 7


def test_zero_init_attention_can_be_turned_off():
    backbone = MRLAViT(zero_init_attention=False, **SMALL)
    backbone.init_weights()
    assert all(torch.all(branch.norm.weight == 1) for branch in branches(backbone))
    assert all(torch.all(branch.history_norm.weight == 1) for branch in branches(backbone))


def test_a_classifiers_rules_for_layer_norms_spare_the_identity_start():
    from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS

    init_default_scope("mmpretrain")
    model = dict(
        type="ImageClassifier",
        backbone=dict(type="MRLAViT", **SMALL),
        init_cfg=[dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0)],
    )
    classifier = MMPRETRAIN_MODELS.build(model)
    classifier.init_weights()
    assert all(torch.all(branch.norm.weight == 0) for branch in branches(classifier))
    assert torch.all(classifier.backbone.ln1.weight == 1)


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_bf16_autocast_on_cpu_stays_close(variant):
    backbone = randomise(MRLAViT(layer_attention=variant, out_type="featmap", **SMALL)).eval()
    image = torch.randn(1, 3, 48, 80)
    (exact,) = backbone(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (rough,) = backbone(image)
    assert (rough.float() - exact).norm() < 0.05 * exact.norm()


def test_channels_last_gives_the_same_values():
    backbone = randomise(MRLAViT(out_type="featmap", **SMALL)).double().eval()
    image = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    (expected,) = backbone(image)
    (actual,) = backbone.to(memory_format=torch.channels_last)(image.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)


def test_positions_of_a_grid_that_is_not_square_are_named():
    """mmpretrain resizes square grids alone, and ends on an assertion otherwise."""
    narrow, square = (MRLAViT(TINY, img_size=size) for size in ((64, 32), 64))
    with pytest.raises(InputError, match=r"pos_embed of shape \(1, 9, 32\) cannot be resized to \(1, 17, 32\)"):
        square.load_state_dict(narrow.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="deit-huge"), "arch='deit-huge' is unknown.*deit-tiny"),
        (dict(arch=dict(embed_dims=32, num_layers=2)), "must be a name or a dict with embed_dims"),
        (dict(arch=dict(TINY, num_heads=5)), "embed_dims=32.*num_heads=5"),
        (dict(arch=dict(TINY, embed_dims=36)), "head_channels=16.*channels=36"),
        (dict(layer_attention=dict(type="MRLALight", head_channels=24)), "head_channels=24.*channels=32"),
        (dict(layer_attention=dict(type="MRLAHeavy")), "MRLAHeavy.*MRLABase"),
        (dict(layer_attention=dict(type="MRLALight", heads=4)), "heads"),
        (dict(stage_blocks=0), "stage_blocks=0"),
        (dict(stage_blocks=(2, 2)), r"stage_blocks=\(2, 2\).*6 blocks"),
        (dict(stage_blocks=(0, 6)), r"stage_blocks=\(0, 6\)"),
        (dict(out_indices=6), "out_indices=6 .*6 blocks"),
        (dict(out_indices=(-7,)), r"out_indices=\(-7,\)"),
        (dict(out_indices=(3, 1)), "ascending"),
        (dict(out_indices=()), "out_indices"),
        (dict(frozen_stages=7), "frozen_stages=7"),
        (dict(with_cls_token=False, with_dist_token=True, out_type="raw"), "with_dist_token=True needs"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(InputError, match=message):
        MRLAViT(**{**SMALL, **options})


@pytest.mark.parametrize("size", [(15, 64), (64, 8), (1, 1)])
def test_an_image_smaller_than_a_patch_is_named(size):
    with pytest.raises(InputError, match=f"{size[0]} x {size[1]} pixels.*16 x 16"):
        MRLAViT(**SMALL)(torch.randn(1, 3, *size))
