"""ViT and MRLAViT: mmpretrain's outputs, tokens, positions, stages, freezing, depths."""

import pytest
import torch
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer
from torch import nn

from mrla_mm.backbones import MRLAViT, ViT, vit
from mrla_mm.errors import InputError

from .common import ARCH, branches, randomize

SMALL = dict(arch=ARCH, img_size=64, stage_blocks=2)


@pytest.mark.parametrize("size", [(64, 64), (48, 112), (50, 33), (15, 64)])
@pytest.mark.parametrize("dist", [False, True])
def test_weights_of_mmpretrain_keep_their_outputs(dist, size):
    host = randomize(
        (DistilledVisionTransformer if dist else VisionTransformer)(
            ARCH, img_size=64, out_indices=[1, 5]
        )
    )
    host.eval()
    image = torch.randn(2, 3, *size)
    options = dict(img_size=64, out_indices=(1, -1), with_dist_token=dist)
    for ours in (ViT(ARCH, **options), MRLAViT(ARCH, **options)):
        result = ours.load_state_dict(host.state_dict(), strict=False)
        assert not result.unexpected_keys and all(".mrla." in key for key in result.missing_keys)
        for level, expected in zip(ours.eval()(image), host(image), strict=True):
            torch.testing.assert_close(level, expected)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_output_shapes(extra):
    expected = {
        "raw": (2, extra + 3 * 7, 32),
        "featmap": (2, 32, 3, 7),
        "avg_featmap": (2, 32),
        "cls_token": (2, 32),
    }
    for out_type, shape in expected.items() if extra else list(expected.items())[:3]:
        tokens = dict(with_cls_token=extra > 0, with_dist_token=extra > 1)
        backbone = MRLAViT(**tokens, out_type=out_type, out_indices=(1, 5), **SMALL)
        assert {branch.extra_tokens for branch in branches(backbone)} == {extra}
        for out in (outs := backbone(torch.randn(2, 3, 48, 112))):
            assert {tensor.shape for tensor in (out if isinstance(out, tuple) else (out,))} == {
                shape
            }
        assert len(outs) == 2


def test_exported_positions_are_those_of_a_forward_pass(monkeypatch):
    backbone = randomize(ViT(ARCH, img_size=64)).eval()
    image = torch.randn(1, 3, 48, 112)
    expected = backbone(image)
    monkeypatch.setattr(vit, "is_exporting", lambda: True)
    torch.testing.assert_close(backbone(image), expected)


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
    assert {
        i for i, branch in enumerate(branches(backbone)) if branch.attention.first_in_stage
    } == starts


@pytest.mark.parametrize("stage_blocks", [0, -1, (2, 2), (0, 6), (7, -1)])
def test_stages_that_do_not_add_up_are_named(stage_blocks):
    with pytest.raises(InputError, match="stage_blocks"):
        MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})


def test_drop_path_is_the_blocks_own():
    backbone = MRLAViT(drop_path_rate=0.5, **SMALL)
    assert isinstance(backbone.layers[0].mrla.drop_path, nn.Identity)
    assert [layer.mrla.drop_path.drop_prob for layer in backbone.layers[1:]] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )


@pytest.mark.parametrize("stages", [-1, 0, 2, 6])
def test_frozen_stages(stages):
    backbone = MRLAViT(frozen_stages=stages, with_dist_token=True, drop_path_rate=0.5, **SMALL)
    for _ in range(2):
        for index, layer in enumerate(backbone.layers):
            assert all(p.requires_grad is (index >= stages) for p in layer.parameters())
        embedding = [
            backbone.cls_token,
            backbone.dist_token,
            backbone.pos_embed,
            *backbone.patch_embed.parameters(),
        ]
        assert all(p.requires_grad is (stages < 0) for p in embedding)
        assert all(p.requires_grad is (stages < 6) for p in backbone.ln1.parameters())
        backbone.train()
    assert [layer.mrla.training for layer in backbone.layers] == [
        index >= stages for index in range(6)
    ]


def test_depths_for_layer_decay():
    backbone = MRLAViT(with_dist_token=True, **SMALL)
    depths = {
        name: backbone.get_layer_depth(f"backbone.{name}", "backbone.")
        for name, _ in backbone.named_parameters()
    }
    assert {total for _, total in depths.values()} == {6 + 2}
    for name in ("cls_token", "dist_token", "pos_embed", "patch_embed.projection.weight"):
        assert depths[name][0] == 0
    assert depths["layers.0.mrla.norm.weight"][0] == depths["layers.0.ln1.weight"][0] == 1
    assert depths["layers.5.mrla.attention.value.weight"][0] == 6
    assert (
        depths["ln1.weight"][0]
        == backbone.get_layer_depth("bbox_head.fc.weight", "backbone.")[0]
        == 7
    )
