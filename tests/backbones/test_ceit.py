"""CeiT and MRLACeiT: parameters, an independent transcription of the whole model, sizes and what each argument does."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention.tokens import to_map
from mrla_mm.backbones import CeiT, MRLACeiT

from .common import assert_same_with_gradients, batch_norm, branches, count, gradients, stage_by_the_algorithms

# Plain, light and base with a 1000-class head. CeiT's paper: 6.4 M and 24.2 M; Table 1: light 6.4 M and 24.3 M.
PARAMETERS = {
    "ceit-tiny": (6_354_600, 6_386_976, 6_380_064),
    "ceit-small": (24_200_232, 24_264_864, 24_251_040),
}
TINY = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=24)
SMALL = dict(arch=TINY, img_size=64, stem_channels=8)


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameters_with_a_1000_class_head(arch):
    with torch.device("meta"):
        backbones = [CeiT(arch), *(MRLACeiT(arch, dict(type=name)) for name in ("MRLALight", "MRLABase"))]
    head = (backbones[0].embed_dims + 1) * 1000
    assert tuple(count(backbone) + head for backbone in backbones) == PARAMETERS[arch]


def test_parameters_agree_with_the_papers_millions():
    millions = {arch: tuple(round(number / 1e6, 1) for number in numbers) for arch, numbers in PARAMETERS.items()}
    assert millions == {"ceit-tiny": (6.4, 6.4, 6.4), "ceit-small": (24.2, 24.3, 24.3)}


def test_root_registry_builds_light_in_three_stages_of_four_by_default():
    with torch.device("meta"):
        backbone = MODELS.build(dict(type="MRLACeiT"))
    assert [branch.attention.first_in_stage for branch in branches(backbone)] == [True, False, False, False] * 3
    assert {(type(b.attention).__name__, b.attention.heads, b.extra_tokens) for b in branches(backbone)} == {
        ("MRLALight", 12, 1)
    }


def layer_norm(tokens, module):
    centred = tokens - tokens.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6) * module.weight + module.bias


def attend(queries, tokens, attention):
    """Multi-head attention of some tokens' queries over all tokens, one head after another."""
    channels = tokens.shape[-1]
    size = channels // attention.num_heads
    weights, biases = attention.qkv.weight.split(channels), attention.qkv.bias.split(channels)
    query, key, value = (
        source @ weight.T + bias
        for source, weight, bias in zip((queries, tokens, tokens), weights, biases, strict=True)
    )
    heads = []
    for h in range(attention.num_heads):
        cut = slice(h * size, (h + 1) * size)
        scores = query[..., cut] @ key[..., cut].transpose(1, 2) / size**0.5
        exponents = torch.exp(scores)
        heads.append(exponents / exponents.sum(-1, keepdim=True) @ value[..., cut])
    return torch.cat(heads, dim=-1) @ attention.proj.weight.T + attention.proj.bias


def gelu(x):
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def plain_block(x, layer, grid):
    """One encoder block of CeiT: attention, then LeFF on the patches with the class token passed by."""
    normed = layer_norm(x, layer.ln1)
    x = x + attend(normed, normed, layer.attn)
    normed, ffn = layer_norm(x, layer.ln2), layer.ffn
    patches = torch.stack([image[1:].T.reshape(-1, *grid) for image in normed])  # row by row
    up = torch.einsum("oc,bchw->bohw", ffn.conv1.weight[:, :, 0, 0], patches) + ffn.conv1.bias.reshape(-1, 1, 1)
    up = gelu(batch_norm(up, ffn.bn1))
    padded, spread = F.pad(up, (1, 1, 1, 1)), ffn.conv2.bias.reshape(-1, 1, 1)
    for i in range(3):
        for j in range(3):
            tap = ffn.conv2.weight[:, 0, i, j].reshape(-1, 1, 1)
            spread = spread + tap * padded[:, :, i : i + grid[0], j : j + grid[1]]
    spread = gelu(batch_norm(spread, ffn.bn2))
    down = torch.einsum("oc,bchw->bohw", ffn.conv3.weight[:, :, 0, 0], spread) + ffn.conv3.bias.reshape(-1, 1, 1)
    down = batch_norm(down, ffn.bn3)
    return x + torch.cat([normed[:, :1], torch.stack([image.reshape(len(image), -1).T for image in down])], dim=1)


def transcribe(backbone, image, grid, kind):
    """The class token of the whole model, stages of two blocks; kind "plain", "light" or "base"."""
    conv, _ = backbone.stem
    stem = batch_norm(F.conv2d(image, conv.conv.weight, stride=2, padding=3), conv.bn)
    stem = F.max_pool2d(stem, 3, 2, 1)
    patch = backbone.patch_embed.projection
    cells = stem.unfold(2, 4, 4).unfold(3, 4, 4)  # (B, C, H, W, 4, 4)
    embedded = torch.einsum("bchwij,ocij->bhwo", cells, patch.weight).flatten(1, 2) + patch.bias
    positions = backbone.pos_embed[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    positions = F.interpolate(positions.float(), size=grid, mode="bicubic").double().flatten(2).transpose(1, 2)
    tokens = torch.cat([(backbone.cls_token + backbone.pos_embed[:, :1]).expand(len(image), -1, -1), embedded], 1)
    tokens = tokens + torch.cat([torch.zeros_like(positions[:, :1]), positions], 1)

    class_tokens = []
    blocks = [lambda x, layer=layer: plain_block(x, layer, grid) for layer in backbone.layers]
    for start in (0, 2):
        stage_input = tokens
        for end in (start + 1, start + 2):
            if kind == "plain":
                tokens = blocks[end - 1](tokens)
            else:
                found = [layer.mrla for layer in backbone.layers[start:end]]
                tokens = stage_by_the_algorithms(kind, blocks[start:end], found, stage_input, grid, 1)
            class_tokens.append(tokens[:, 0])

    lca, seen = backbone.lca, torch.stack(class_tokens, 1)
    normed = layer_norm(seen, lca.ln1)
    last = seen[:, -1:] + attend(normed[:, -1:], normed, lca.attn)
    hidden, out = lca.ffn.layers[0][0], lca.ffn.layers[1]
    last = last + gelu(layer_norm(last, lca.ln2) @ hidden.weight.T + hidden.bias) @ out.weight.T + out.bias
    return layer_norm(last[:, 0], backbone.ln1)


def randomise(backbone):
    for name, parameter in backbone.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 and "norm" in name else 0.0, std=0.3)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return backbone


@pytest.mark.parametrize("kind", ["plain", "light", "base"])
@pytest.mark.parametrize("size", [(64, 64), (48, 112)], ids=["square", "3x7"])
def test_the_whole_model_agrees_with_the_papers(size, kind):
    torch.manual_seed(0)
    if kind == "plain":
        backbone = CeiT(**SMALL)
    else:
        attention = dict(type=dict(light="MRLALight", base="MRLABase")[kind])
        backbone = MRLACeiT(layer_attention=attention, stage_blocks=2, **SMALL)
    backbone = randomise(backbone).double().eval()
    image = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    expected = transcribe(backbone, image, (size[0] // 16, size[1] // 16), kind)
    # bicubic interpolation runs in single precision in the host
    assert_same_with_gradients(backbone(image)[0], expected, [image, *backbone.parameters()], tolerance=1e-6)


@pytest.mark.parametrize("size", [(16, 16), (17, 95), (64, 40)])
def test_any_size_gives_ceiled_grids(size):
    backbone = MRLACeiT(out_type="featmap", out_indices=(1, 3), **SMALL).eval()
    grid = tuple(-(-side // 16) for side in size)
    assert [tuple(level.shape) for level in backbone(torch.randn(1, 3, *size))] == [(1, 32, *grid)] * 2


def test_maps_lay_patches_out_row_by_row():
    options = dict(SMALL, out_indices=(1, 3))
    maps = CeiT(out_type="featmap", **options).eval()
    raw = CeiT(out_type="raw", **options).eval()
    raw.load_state_dict(maps.state_dict())
    image = torch.randn(1, 3, 48, 112)
    for level, tokens in zip(maps(image), raw(image), strict=True):
        assert torch.equal(level, to_map(tokens[:, 1:], (3, 7)))


def test_every_parameter_learns_whatever_is_put_out():
    for options in (dict(), dict(out_type="featmap"), dict(out_type="avg_featmap"), dict(final_norm=False)):
        backbone = MRLACeiT(**SMALL, **options)
        missing = [key for key, gradient in gradients(backbone, torch.randn(2, 3, 32, 48)).items() if gradient is None]
        assert not missing, (options, missing)
        assert (backbone.lca is None) is ("out_type" in options)


def test_a_model_without_a_class_token_puts_out_maps():
    backbone = MRLACeiT(with_cls_token=False, out_type="featmap", **SMALL).eval()
    assert backbone.cls_token is None and {branch.extra_tokens for branch in branches(backbone)} == {0}
    assert backbone(torch.randn(1, 3, 48, 112))[0].shape == (1, 32, 3, 7)


@pytest.mark.parametrize("final_norm", [True, False])
def test_the_class_token_is_normed_behind_the_lca(final_norm):
    backbone = CeiT(final_norm=final_norm, **SMALL).eval()
    token = backbone(torch.randn(2, 3, 64, 64))[0]
    mean_square = (token - token.mean(-1, keepdim=True)).square().mean(-1)
    assert torch.allclose(mean_square, torch.ones(2), atol=1e-3) is final_norm


def test_layer_attention_and_feed_forward_share_the_blocks_drop_path_probability():
    backbone = MRLACeiT(drop_path_rate=0.3, **SMALL)
    for index, layer in enumerate(backbone.layers):
        rates = {layer.attn.out_drop.drop_prob, layer.ffn.drop_path.drop_prob}
        rates |= {getattr(layer.mrla.drop_path, "drop_prob", 0.0)}
        assert len(rates) == 1 and rates.pop() == pytest.approx(0.1 * index)


def test_drop_rate_reaches_the_feed_forward():
    backbone = CeiT(drop_rate=0.5, **SMALL)
    tokens, grid = torch.randn(1, 13, 32), (3, 4)
    out = backbone.layers[0].ffn(tokens, torch.zeros_like(tokens), grid)
    assert 0.3 < (out[:, 1:] == 0).float().mean() < 0.7


def test_freezing_every_block_freezes_all():
    backbone = MRLACeiT(frozen_stages=4, **SMALL).train()
    assert not any(p.requires_grad for p in backbone.parameters())
    assert not any(m.training for m in (backbone.stem, backbone.lca, backbone.ln1, *backbone.layers))
    embedding = MRLACeiT(frozen_stages=0, **SMALL).train()
    frozen = {key.split(".")[0] for key, p in embedding.named_parameters() if not p.requires_grad}
    assert frozen == {"stem", "patch_embed", "cls_token", "pos_embed"}


def test_norm_eval_keeps_batch_norms_in_evaluation():
    backbone = CeiT(norm_eval=True, batch_norm_cfg=dict(type="SyncBN"), **SMALL).train()
    norms = [m for m in backbone.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert len(norms) == 1 + 3 * 4 and not any(m.training for m in norms)
    assert backbone.layers[0].training


def test_depths_for_layer_decay():
    backbone = MRLACeiT(**SMALL)
    names = (
        "stem.0.conv.weight",
        "cls_token",
        "layers.0.ffn.bn1.weight",
        "layers.3.mrla.norm.weight",
        "lca.ln1.weight",
    )
    assert [backbone.get_layer_depth(f"backbone.{name}", "backbone.") for name in names] == [
        (0, 6),
        (0, 6),
        (1, 6),
        (4, 6),
        (5, 6),
    ]


def test_positions_of_another_image_size_load():
    saved = CeiT(**dict(SMALL, img_size=64)).state_dict()
    backbone = CeiT(**dict(SMALL, img_size=(96, 128)))
    assert backbone.patch_resolution == (6, 8)
    backbone.load_state_dict(saved)
    assert backbone.pos_embed.shape == (1, 49, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="ceit-huge"), "arch='ceit-huge' is unknown; use one of ceit-small, ceit-tiny"),
        (dict(arch=dict(embed_dims=32)), "must be a name or a dict with embed_dims"),
        (dict(patch_size=8), "patch_size=8"),
        (dict(with_dist_token=True), "with_dist_token=True"),
        (dict(out_indices=(1, 3)), r"out_indices=\(1, 3\).*'featmap'"),
        (dict(out_type="featmap", out_indices=(4,)), r"out_indices=\(4,\)"),
        (dict(frozen_stages=5), "frozen_stages=5"),
        (dict(stage_blocks=(2, 1)), r"stage_blocks=\(2, 1\)"),
        (dict(layer_attention=dict(type="MRLALight", head_channels=12)), "head_channels=12.*channels=32"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MRLACeiT(**{**SMALL, **options})


def test_a_small_image_is_named():
    with pytest.raises(ValueError, match="15 x 64 pixels is smaller than a patch of 16 x 16"):
        CeiT(**SMALL)(torch.randn(1, 3, 15, 64))


def test_tokens_that_do_not_fit_the_grid_are_named():
    tokens = torch.randn(1, 13, 32)
    with pytest.raises(ValueError, match="13 tokens do not fit a 3 x 5 grid with 1 extra"):
        CeiT(**SMALL).layers[0].ffn(tokens, tokens, (3, 5))
