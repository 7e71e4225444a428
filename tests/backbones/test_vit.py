"""ViT against mmpretrain's, CeiT against an independent transcription, and their arguments."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.models.backbones import DistilledVisionTransformer
from torch import nn

from mrla_mm.backbones import MRLACeiT, MRLAViT
from mrla_mm.errors import InputError

from .common import ARCH, assert_same_with_gradients, branches, gradients, randomize

SMALL = dict(arch=ARCH, img_size=64, stage_blocks=2)


def test_weights_of_a_distilled_transformer_keep_their_outputs():
    plain = randomize(DistilledVisionTransformer(ARCH, img_size=64, out_indices=[1, 5]))
    plain.eval()
    image = torch.randn(2, 3, 50, 33)
    for attention in (None, "MRLALight"):
        ours = MRLAViT(ARCH, attention, img_size=64, out_indices=(1, -1), with_dist_token=True)
        result = ours.load_state_dict(plain.state_dict(), strict=False)
        assert not result.unexpected_keys and all(".mrla." in key for key in result.missing_keys)
        torch.testing.assert_close(ours.eval()(image), plain(image))


OUT_TYPES = list(itertools.product([0, 1, 2], ["raw", "featmap", "avg_featmap"]))


@pytest.mark.parametrize(("extra", "out_type"), [*OUT_TYPES, (1, "cls_token"), (2, "cls_token")])
def test_output_shapes(extra, out_type):
    shapes = dict(raw=(2, extra + 3 * 7, 32), featmap=(2, 32, 3, 7))
    tokens = dict(with_cls_token=extra > 0, with_dist_token=extra > 1)
    backbone = MRLAViT(**tokens, out_type=out_type, out_indices=(1, 5), **SMALL)
    assert {branch.extra_tokens for branch in branches(backbone)} == {extra}
    outs = backbone(torch.randn(2, 3, 48, 112))
    assert len(outs) == 2
    for out in outs:
        tensors = out if isinstance(out, tuple) else (out,)  # class and distillation token
        assert {tensor.shape for tensor in tensors} == {shapes.get(out_type, (2, 32))}


def test_tokens_and_positions_are_drawn():
    backbone = MRLAViT(with_dist_token=True, **SMALL)
    backbone.init_weights()
    for drawn in (backbone.cls_token, backbone.dist_token, backbone.pos_embed):
        assert 0.01 < drawn.std() < 0.03


@pytest.mark.parametrize(
    ("stage_blocks", "starts"),
    [(4, {0, 4}), (1, {0, 1, 2, 3, 4, 5}), (9, {0}), ((1, 3, 2), {0, 1, 4}), ([6], {0})],
)
def test_stages(stage_blocks, starts):
    backbone = MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})
    firsts = [branch.attention.first_in_stage for branch in branches(backbone)]
    assert {i for i, first in enumerate(firsts) if first} == starts
    for wrong in (0, -1, (2, 2), (0, 6), (7, -1)):
        with pytest.raises(InputError, match="stage_blocks"):
            MRLAViT(**{**SMALL, "stage_blocks": wrong})


@pytest.mark.parametrize(("stages", "learning"), [(0, {"layers", "ln1"}), (6, set())])
def test_no_frozen_stage_freezes_the_stem_and_the_last_everything(stages, learning):
    backbone = MRLAViT(frozen_stages=stages, with_dist_token=True, **SMALL).train()
    found = {name.split(".")[0] for name, p in backbone.named_parameters() if p.requires_grad}
    assert found == learning
    assert all(layer.training == bool(learning) for layer in backbone.layers)


CEIT_ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=24)
SMALL_CEIT = dict(arch=CEIT_ARCH, img_size=64, stem_channels=8, layer_scale_init_value=0.1)


def batch_norm(x, norm):
    statistics = norm.running_mean, norm.running_var
    return F.batch_norm(x, *statistics, norm.weight, norm.bias, eps=norm.eps)


def layer_norm(tokens, module):
    return F.layer_norm(tokens, tokens.shape[-1:], module.weight, module.bias, eps=1e-6)


def attend(queries, tokens, attention):
    parameters = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
    heads = []
    for source, parameter in zip((queries, tokens, tokens), parameters, strict=True):
        projected = F.linear(source, *parameter).unflatten(-1, (attention.num_heads, -1))
        heads.append(projected.transpose(1, 2))
    query, key, value = heads
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1)
    return attention.proj((scores @ value).transpose(1, 2).flatten(2))


def plain_block(x, layer, grid):
    normed = layer_norm(x, layer.ln1)
    x = x + layer.attn.gamma1.weight * attend(normed, normed, layer.attn)
    normed, ffn = layer_norm(x, layer.ln2), layer.ffn
    maps = normed[:, 1:].transpose(1, 2).unflatten(2, grid)  # row by row
    maps = F.gelu(batch_norm(F.conv2d(maps, ffn.conv1.weight, ffn.conv1.bias), ffn.bn1))
    maps = F.conv2d(maps, ffn.conv2.weight, ffn.conv2.bias, padding=1, groups=maps.shape[1])
    maps = F.gelu(batch_norm(maps, ffn.bn2))
    maps = batch_norm(F.conv2d(maps, ffn.conv3.weight, ffn.conv3.bias), ffn.bn3)
    return x + ffn.gamma2.weight * torch.cat([normed[:, :1], maps.flatten(2).transpose(1, 2)], 1)


def transcribe(backbone, image, grid, mrla):
    conv, _ = backbone.stem
    stem = batch_norm(F.conv2d(image, conv.conv.weight, stride=2, padding=3), conv.bn)
    patch = backbone.patch_embed.projection
    patches = F.conv2d(F.max_pool2d(stem, 3, 2, 1), patch.weight, patch.bias, stride=4)
    positions = backbone.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    patches = patches + F.interpolate(positions.float(), size=grid, mode="bicubic").double()
    class_token = (backbone.cls_token + backbone.pos_embed[:, :1]).expand(len(image), -1, -1)
    tokens = torch.cat([class_token, patches.flatten(2).transpose(1, 2)], 1)
    class_tokens, memory = [], ()
    for index, layer in enumerate(backbone.layers):
        before, tokens = tokens, plain_block(tokens, layer, grid)
        if mrla:
            memory = memory if index % 2 else ()
            tokens, *memory = layer.mrla(tokens, before, grid, *memory)
        class_tokens.append(tokens[:, 0])
    lca, seen = backbone.lca, torch.stack(class_tokens, 1)
    normed = layer_norm(seen, lca.ln1)
    last = seen[:, -1:] + attend(normed[:, -1:], normed, lca.attn)
    hidden, out = lca.ffn.layers[0][0], lca.ffn.layers[1]
    last = last + out(F.gelu(hidden(layer_norm(last, lca.ln2))))
    return layer_norm(last[:, 0], backbone.ln1)


@pytest.mark.parametrize("variant", [None, "MRLALight", "MRLABase"])
@pytest.mark.parametrize("size", [(64, 64), (48, 112)], ids=["square", "3x7"])
def test_the_whole_model_agrees_with_the_paper(size, variant):
    torch.manual_seed(0)
    backbone = MRLACeiT(layer_attention=variant, stage_blocks=2, **SMALL_CEIT)
    backbone = randomize(backbone).double().eval()
    image = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    expected = transcribe(backbone, image, (size[0] // 16, size[1] // 16), variant is not None)
    leaves = [image, *backbone.parameters()]
    # mmpretrain interpolates positions in single precision
    assert_same_with_gradients(backbone(image), [expected], leaves, tolerance=1e-6)


@pytest.mark.parametrize("options", [{}, dict(final_norm=False), dict(out_type="avg_featmap")])
def test_every_parameter_learns_whatever_is_returned(options):
    backbone = MRLACeiT(**SMALL_CEIT, **options)
    found = gradients(backbone, torch.randn(2, 3, 32, 48))
    assert not [name for name, gradient in found.items() if gradient is None]
    assert (backbone.lca is None) is ("out_type" in options)


def test_layer_attention_and_feed_forward_share_the_blocks_drop_path_probability():
    backbone = MRLACeiT(drop_path_rate=0.3, **SMALL_CEIT)
    for index, layer in enumerate(backbone.layers):
        rates = {layer.attn.out_drop.drop_prob, layer.ffn.drop_path.drop_prob}
        rates |= {getattr(layer.mrla.drop_path, "drop_prob", 0.0)}
        assert len(rates) == 1 and rates.pop() == pytest.approx(0.1 * index)


def test_norm_eval_depths_for_layer_decay_and_outputs_of_ceit():
    backbone = MRLACeiT(norm_eval=True, batch_norm_cfg=dict(type="SyncBN"), **SMALL_CEIT).train()
    norms = [m for m in backbone.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert len(norms) == 1 + 3 * 4 and not any(m.training for m in norms)
    assert backbone.layers[0].training
    depths = {"stem.0.conv": 0, "pre_norm": 0, "layers.0.ffn.bn1": 1}
    depths |= {"layers.3.mrla.norm": 4, "lca.ln1": 5}
    for name, depth in depths.items():
        assert backbone.get_layer_depth(f"backbone.{name}.weight", "backbone.") == (depth, 6)
    for wrong in (dict(out_indices=(1, 3)), dict(layer_cfgs=dict(num_fcs=3))):
        with pytest.raises(InputError, match=next(iter(wrong))):
            MRLACeiT(**wrong, **SMALL_CEIT)
    assert len(MRLACeiT(out_indices=(3,), **SMALL_CEIT)(torch.randn(1, 3, 15, 64))) == 1
