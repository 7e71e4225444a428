"""ViT and MRLAViT: mmpretrain's weights and outputs, tokens, positions, stages, freezing and depths."""

import pytest
import torch
from mmengine.registry import init_default_scope
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from torch import nn

from mrla_mm.backbones import MRLAViT, ViT
from mrla_mm.errors import InputError

from .common import ARCH, branches, gradients, randomize

SMALL = dict(arch=ARCH, img_size=64, stage_blocks=2)


@pytest.mark.parametrize("size", [(64, 64), (48, 112), (50, 33), (15, 64)])
@pytest.mark.parametrize("dist", [False, True])
def test_weights_of_mmpretrain_keep_their_outputs(dist, size):
    host = randomize((DistilledVisionTransformer if dist else VisionTransformer)(ARCH, img_size=64, out_indices=[1, 5]))
    host.eval()
    image = torch.randn(2, 3, *size)
    options = dict(img_size=64, out_indices=(1, -1), with_dist_token=dist)
    for ours in (ViT(ARCH, **options), MRLAViT(ARCH, **options)):
        result = ours.load_state_dict(host.state_dict(), strict=False)
        assert not result.unexpected_keys and all(".mrla." in key for key in result.missing_keys)
        for level, expected in zip(ours.eval()(image), host(image), strict=True):
            torch.testing.assert_close(level, expected)


@pytest.mark.parametrize(
    ("out_type", "extra"),
    [(out_type, extra) for out_type in ("raw", "featmap", "avg_featmap") for extra in range(3)]
    + [("cls_token", 1), ("cls_token", 2)],
)
def test_output_shapes(out_type, extra):
    backbone = MRLAViT(
        with_cls_token=extra > 0, with_dist_token=extra > 1, out_type=out_type, out_indices=(1, 5), **SMALL
    )
    assert {branch.extra_tokens for branch in branches(backbone)} == {extra}
    expected = {"raw": (2, extra + 3 * 7, 32), "cls_token": (2, 32), "featmap": (2, 32, 3, 7), "avg_featmap": (2, 32)}
    outs = backbone(torch.randn(2, 3, 48, 112))
    assert len(outs) == 2
    for out in outs:
        for tensor in out if isinstance(out, tuple) else (out,):
            assert tuple(tensor.shape) == expected[out_type]


def test_tokens_and_positions_are_drawn_and_those_of_a_file_kept(tmp_path):
    backbone = MRLAViT(with_dist_token=True, **SMALL)
    backbone.init_weights()
    for drawn in (backbone.cls_token, backbone.dist_token, backbone.pos_embed):
        assert 0.01 < drawn.std() < 0.03
    path = tmp_path / "weights.pth"
    torch.save(dict(state_dict=randomize(backbone).state_dict()), path)
    loaded = MRLAViT(with_dist_token=True, init_cfg=dict(type="Pretrained", checkpoint=str(path)), **SMALL)
    loaded.init_weights()
    for name, tensor in backbone.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, msg=name)


def test_the_history_is_the_input_of_the_block():
    """With the gated value silenced, a block adds lambda times its own normed input, to patches alone."""
    backbone = randomize(MRLAViT(out_type="raw", out_indices=(2, 3), final_norm=False, **SMALL)).eval()
    for branch in branches(backbone):
        nn.init.zeros_(branch.norm.weight)
        nn.init.zeros_(branch.norm.bias)
    before, after = backbone(torch.randn(2, 3, 48, 80))
    layer = backbone.layers[3]
    expected = layer(before)
    expected[:, 1:] += layer.mrla.attention.history_scale * layer.mrla.history_norm(before)[:, 1:]
    torch.testing.assert_close(after, expected)


def test_a_feature_map_has_the_place_of_its_patches():
    """A change in one patch of the image changes that patch of the first block most."""
    backbone = randomize(MRLAViT(out_type="featmap", out_indices=0, **SMALL)).eval()
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


@pytest.mark.parametrize(
    ("stage_blocks", "starts"), [(4, {0, 4}), (1, {0, 1, 2, 3, 4, 5}), (9, {0}), ((1, 3, 2), {0, 1, 4}), ([6], {0})]
)
def test_stages(stage_blocks, starts):
    backbone = MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})
    assert {i for i, branch in enumerate(branches(backbone)) if branch.attention.first_in_stage} == starts


@pytest.mark.parametrize("stage_blocks", [0, -1, (2, 2), (0, 6), (7, -1)])
def test_stages_that_do_not_add_up_are_named(stage_blocks):
    with pytest.raises(InputError, match="stage_blocks"):
        MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})


def test_memory_lives_for_a_stage():
    """With a second stage of its own, a block sees nothing of the first stage's values."""
    options = dict(SMALL, arch=dict(ARCH, num_layers=2), layer_attention=dict(type="MRLABase"), out_type="featmap")
    joined = randomize(MRLAViT(**{**options, "stage_blocks": 2}))
    apart = MRLAViT(**{**options, "stage_blocks": (1, 1)})
    apart.load_state_dict(joined.state_dict())
    image = torch.randn(2, 3, 64, 64)
    assert not torch.allclose(joined(image)[0], apart(image)[0], atol=1e-3)
    assert gradients(apart, image)["layers.1.mrla.attention.query.weight"].abs().max() == 0  # one layer to choose from
    assert gradients(joined, image)["layers.1.mrla.attention.query.weight"].abs().max() > 0


def test_drop_path_is_the_blocks_own():
    backbone = MRLAViT(drop_path_rate=0.5, **SMALL)
    assert isinstance(backbone.layers[0].mrla.drop_path, nn.Identity)
    assert [layer.mrla.drop_path.drop_prob for layer in backbone.layers[1:]] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("stages", [-1, 0, 2, 6])
def test_frozen_stages(stages):
    backbone = MRLAViT(frozen_stages=stages, with_dist_token=True, drop_path_rate=0.5, **SMALL)
    for _ in range(2):
        for index, layer in enumerate(backbone.layers):
            assert all(p.requires_grad is (index >= stages) for p in layer.parameters())
        embedding = [backbone.cls_token, backbone.dist_token, backbone.pos_embed, *backbone.patch_embed.parameters()]
        assert all(p.requires_grad is (stages < 0) for p in embedding)
        assert all(p.requires_grad is (stages < 6) for p in backbone.ln1.parameters())
        backbone.train()
    assert [layer.mrla.training for layer in backbone.layers] == [index >= stages for index in range(6)]


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


def test_a_classifiers_rules_for_layer_norms_spare_the_identity_start():
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
