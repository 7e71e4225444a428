"""CeiT and MRLACeiT: an independent transcription of the whole model, and what each argument does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mrla_mm.attention.tokens import to_map
from mrla_mm.backbones import CeiT, MRLACeiT

from .common import assert_same_with_gradients, branches, gradients, randomize

ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=24)
SMALL = dict(arch=ARCH, img_size=64, stem_channels=8)


def batch_norm(x, module):
    """Batch norm in evaluation of (B, C, H, W)."""
    mean, var, weight, bias = (
        tensor.reshape(-1, 1, 1) for tensor in (module.running_mean, module.running_var, module.weight, module.bias)
    )
    return (x - mean) / torch.sqrt(var + module.eps) * weight + bias


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


def transcribe(backbone, image, grid, mrla):
    """The class token of the whole model, plain or with our branches in stages of two blocks."""
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

    class_tokens, memory = [], None
    for index, layer in enumerate(backbone.layers):
        before, tokens = tokens, plain_block(tokens, layer, grid)
        if mrla:
            tokens, memory = layer.mrla(tokens, before, memory if index % 2 else None, grid=grid)
        class_tokens.append(tokens[:, 0])

    lca, seen = backbone.lca, torch.stack(class_tokens, 1)
    normed = layer_norm(seen, lca.ln1)
    last = seen[:, -1:] + attend(normed[:, -1:], normed, lca.attn)
    hidden, out = lca.ffn.layers[0][0], lca.ffn.layers[1]
    last = last + gelu(layer_norm(last, lca.ln2) @ hidden.weight.T + hidden.bias) @ out.weight.T + out.bias
    return layer_norm(last[:, 0], backbone.ln1)


@pytest.mark.parametrize("variant", [None, "MRLALight", "MRLABase"])
@pytest.mark.parametrize("size", [(64, 64), (48, 112)], ids=["square", "3x7"])
def test_the_whole_model_agrees_with_the_paper(size, variant):
    torch.manual_seed(0)
    backbone = (
        CeiT(**SMALL) if variant is None else MRLACeiT(layer_attention=dict(type=variant), stage_blocks=2, **SMALL)
    )
    backbone = randomize(backbone).double().eval()
    image = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    expected = transcribe(backbone, image, (size[0] // 16, size[1] // 16), variant is not None)
    # mmpretrain interpolates positions in single precision
    assert_same_with_gradients(list(backbone(image)), [expected], [image, *backbone.parameters()], tolerance=1e-6)


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


def test_every_parameter_learns_whatever_is_returned():
    for options in (dict(), dict(out_type="featmap"), dict(out_type="avg_featmap"), dict(final_norm=False)):
        backbone = MRLACeiT(**SMALL, **options)
        missing = [key for key, gradient in gradients(backbone, torch.randn(2, 3, 32, 48)).items() if gradient is None]
        assert not missing, (options, missing)
        assert (backbone.lca is None) is ("out_type" in options)


def test_a_model_without_a_class_token_returns_maps():
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
    saved = CeiT(**SMALL).state_dict()
    backbone = CeiT(**dict(SMALL, img_size=(96, 128)))
    assert backbone.patch_resolution == (6, 8)
    backbone.load_state_dict(saved)
    assert backbone.pos_embed.shape == (1, 49, 32)


def test_the_class_token_of_another_block_is_refused():
    with pytest.raises(ValueError, match="out_indices"):
        CeiT(out_indices=(1, 3), **SMALL)
    assert len(CeiT(out_indices=(3,), **SMALL)(torch.randn(1, 3, 15, 64))) == 1
