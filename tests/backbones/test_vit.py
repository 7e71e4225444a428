"""ViT and MRLAViT: mmpretrain's outputs, tokens, positions, stages, freezing, depths."""

import itertools

import pytest
import torch
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer

from mrla_mm.backbones import MRLACeiT, MRLAViT, ViT, vit
from mrla_mm.errors import InputError

from .common import ARCH, branches, randomize

SMALL = dict(arch=ARCH, img_size=64, stage_blocks=2)


@pytest.mark.parametrize("size", [(64, 64), (48, 112), (50, 33), (15, 64)])
@pytest.mark.parametrize("host", [VisionTransformer, DistilledVisionTransformer])
def test_weights_of_mmpretrain_keep_their_outputs(host, size):
    plain = randomize(host(ARCH, img_size=64, out_indices=[1, 5]))
    plain.eval()
    options = dict(img_size=64, out_indices=(1, -1))
    options["with_dist_token"] = host is DistilledVisionTransformer
    image = torch.randn(2, 3, *size)
    for ours in (ViT(ARCH, **options), MRLAViT(ARCH, **options)):
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
    firsts = [branch.attention.first_in_stage for branch in branches(backbone)]
    assert {i for i, first in enumerate(firsts) if first} == starts


@pytest.mark.parametrize("stage_blocks", [0, -1, (2, 2), (0, 6), (7, -1)])
def test_stages_that_do_not_add_up_are_named(stage_blocks):
    with pytest.raises(InputError, match="stage_blocks"):
        MRLAViT(**{**SMALL, "stage_blocks": stage_blocks})


FROZEN = [(MRLAViT, 0, {"layers", "ln1"}), (MRLAViT, 6, set())]
FROZEN += [(MRLACeiT, 0, {"layers", "ln1", "lca"}), (MRLACeiT, 6, set())]


@pytest.mark.parametrize(("kind", "stages", "learning"), FROZEN)
def test_frozen_stages(kind, stages, learning):
    """The distillation token and the stem go with the embedding, norm and LCA with the last."""
    options = dict(SMALL, with_dist_token=True) if kind is MRLAViT else SMALL
    backbone = kind(frozen_stages=stages, **options).train()
    found = {name.split(".")[0] for name, p in backbone.named_parameters() if p.requires_grad}
    assert found == learning
    training = {name for name, module in backbone.named_children() if module.training}
    assert training - {"pre_norm"} == learning | {"layers"}
    assert all(layer.training == bool(learning) for layer in backbone.layers)
