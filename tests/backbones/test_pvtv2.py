"""PVTv2 and MRLAPVTv2: parameters, an independent transcription, drop path, weights and what each argument does."""

import pytest
import torch
from mmdet.models.backbones import PyramidVisionTransformerV2
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.backbones import MRLAPVTv2, PVTv2

from .common import assert_same_with_gradients, branches, count, stage_by_the_algorithms

# Plain, light and base without the classifier. With its 1000 classes the plain models have the millions that PVTv2's
# paper gives for B2 to B5 (25.4, 45.2, 62.6, 82.0); for B0 and B1 that paper and Table 1 say 3.4 and 13.1, which is B0
# without its classifier, and for B1 follows from neither count (13.5 and 14.0).
PARAMETERS = {
    "b0": (3_409_760, 3_424_160, 3_421_088),
    "b1": (13_496_000, 13_524_744, 13_518_600),
    "b2": (24_849_856, 24_908_244, 24_895_764),
    "b3": (44_725_696, 44_837_964, 44_813_964),
    "b4": (62_043_072, 62_202_958, 62_168_782),
    "b5": (81_443_008, 81_657_660, 81_611_772),
}
TINY = dict(embed_dims=32, num_layers=(2, 1, 1, 1), num_heads=(1, 1, 1, 1), sr_ratios=(2, 1, 1, 1), mlp_ratios=(1,) * 4)


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameters_without_a_head(arch):
    backbones = [PVTv2(arch), *(MRLAPVTv2(arch, dict(type=name)) for name in ("MRLALight", "MRLABase"))]
    assert tuple(count(backbone) for backbone in backbones) == PARAMETERS[arch]


@pytest.mark.parametrize(("arch", "millions"), [("b2", 25.4), ("b3", 45.2), ("b4", 62.6), ("b5", 82.0)])
def test_plain_parameters_with_a_1000_class_head_are_those_of_pvtv2s_paper(arch, millions):
    assert round((PARAMETERS[arch][0] + 513 * 1000) / 1e6, 1) == millions


def test_root_registry_builds_the_light_variant_of_b0_by_default():
    backbone = MODELS.build(dict(type="MRLAPVTv2"))
    attention = backbone.layers[0][1][0].mrla.attention
    assert (type(attention).__name__, attention.heads, attention.value_gelu) == ("MRLALight", 2, True)
    assert len(branches(backbone)) == 8


@pytest.mark.parametrize("kind", ["light", "base"])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)], ids=["square", "3x7"])
def test_a_stage_agrees_with_plain_blocks_and_the_papers_algorithms(grid, kind):
    torch.manual_seed(0)
    name = dict(light="MRLALight", base="MRLABase")[kind]
    backbone = MRLAPVTv2("b0", dict(type=name), **TINY).double().eval()
    plain = PyramidVisionTransformerV2(**TINY).double().eval()
    for branch in branches(backbone):
        for parameter in branch.parameters():
            nn.init.normal_(parameter, std=0.7)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    tokens = torch.randn(2, grid[0] * grid[1], 32, dtype=torch.float64, requires_grad=True)
    blocks = backbone.layers[0][1]
    plain_blocks = [lambda x, block=block: block(x, grid) for block in plain.layers[0][1]]
    expected = stage_by_the_algorithms(kind, plain_blocks, branches(blocks), tokens, grid, 0)
    leaves = [tokens, *(p for branch in branches(blocks) for p in branch.parameters())]
    assert_same_with_gradients(backbone.run_stage(blocks, tokens, grid), expected, leaves)


def test_first_in_stage_is_set_where_a_stage_starts():
    backbone = MRLAPVTv2("b2")
    for _, blocks, _ in backbone.layers:
        assert [block.mrla.attention.first_in_stage for block in blocks] == [True] + [False] * (len(blocks) - 1)


def test_layer_attention_shares_the_blocks_drop_path_probability():
    backbone = MRLAPVTv2("b0", drop_path_rate=0.7)
    rates = [block.mrla.drop_path for _, blocks, _ in backbone.layers for block in blocks]
    assert isinstance(rates[0], nn.Identity)
    assert [rate.drop_prob for rate in rates[1:]] == pytest.approx([0.1 * i for i in range(1, 8)])


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_our_own_files_load(tmp_path, prefix):
    saved, path = MRLAPVTv2("b0", **TINY), tmp_path / "classifier.pth"
    nn.init.ones_(saved.layers[0][1][0].mrla.norm.weight)
    torch.save(dict(state_dict={prefix + key: value for key, value in saved.state_dict().items()}), path)
    init_cfg = dict(type="Pretrained", checkpoint=str(path), **(dict(prefix=prefix) if prefix else {}))
    loaded = MRLAPVTv2("b0", init_cfg=init_cfg, **TINY)
    loaded.init_weights()
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def authors_layout(plain):
    """State dict of mmdet's PVTv2 under the names of PVTv2's authors."""
    found = {}
    for key, value in plain.state_dict().items():
        _, stage, part, *rest = key.split(".")
        number = int(stage) + 1
        if part == "0":
            found[f"patch_embed{number}.{'.'.join(rest)}".replace("projection", "proj")] = value
        elif part == "2":
            found[f"norm{number}.{rest[0]}"] = value
        else:
            index, *names = rest
            name = ".".join(names)
            for ours, theirs in (
                ("attn.attn.out_proj.", "attn.proj."),
                ("ffn.layers.0.", "mlp.fc1."),
                ("ffn.layers.1.", "mlp.dwconv.dwconv."),
                ("ffn.layers.4.", "mlp.fc2."),
            ):
                name = name.replace(ours, theirs)
            prefix = f"block{number}.{index}."
            if "in_proj" in name:
                kind = name.rsplit("_", 1)[1]
                channels = len(value) // 3
                found[f"{prefix}attn.q.{kind}"], found[f"{prefix}attn.kv.{kind}"] = value[:channels], value[channels:]
            else:
                linear = "fc" in name and name.endswith("weight")
                found[prefix + name] = value.flatten(1) if linear else value
    return found


def test_a_start_without_weights_is_mmdets_and_an_identity():
    backbone = MRLAPVTv2("b0", **TINY)
    backbone.init_weights()
    assert 0.01 < backbone.layers[0][1][0].attn.attn.out_proj.weight.std() < 0.03
    assert all(not branch.norm.weight.any() and not branch.history_norm.weight.any() for branch in branches(backbone))


def test_weights_of_pvtv2s_authors_start_mrla_as_the_plain_model(tmp_path):
    plain, path = PyramidVisionTransformerV2(**TINY).eval(), tmp_path / "pvt_v2.pth"
    torch.save(authors_layout(plain), path)
    backbone = MRLAPVTv2("b0", init_cfg=dict(type="Pretrained", checkpoint=str(path)), **TINY)
    backbone.init_weights()
    image = torch.randn(1, 3, 64, 96)
    for ours, theirs in zip(backbone.eval()(image), plain(image), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_weights_of_another_size_are_refused_and_nothing_is_loaded(tmp_path, wrapper):
    state, path = authors_layout(PyramidVisionTransformerV2(**TINY)), tmp_path / "pvt_v2_b9.pth"
    torch.save(state if wrapper is None else {wrapper: state}, path)
    init_cfg = dict(type="Pretrained", checkpoint=str(path))
    for options in (dict(num_layers=(1, 1, 1, 1)), dict(num_layers=(2, 1, 1, 2)), dict(mlp_ratios=(1, 1, 1, 2))):
        backbone = PVTv2("b0", init_cfg=init_cfg, **{**TINY, **options})
        before = {key: value.clone() for key, value in backbone.state_dict().items()}
        with pytest.raises(ValueError, match=r"pvt_v2_b9.pth are not of this PVTv2: \d+ tensors.*same arch"):
            backbone.init_weights()
        assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize("size", [(32, 32), (33, 95), (64, 40)])
@pytest.mark.parametrize("indices", [(0, 1, 2, 3), (1, 3)])
def test_any_size_gives_ceiled_grids(size, indices):
    levels = MRLAPVTv2("b0", out_indices=indices).eval()(torch.randn(1, 3, *size))
    channels = [(32, 64, 160, 256)[index] for index in indices]
    strides = [4 * 2**index for index in indices]
    assert isinstance(levels, tuple)
    assert [tuple(level.shape[1:]) for level in levels] == [
        (c, -(-size[0] // s), -(-size[1] // s)) for c, s in zip(channels, strides, strict=True)
    ]


def test_a_small_image_is_named():
    with pytest.raises(ValueError, match=r"24 x 64 pixels leaves stage 0 a 6 x 16 grid.*sr_ratios\[0\]=8"):
        PVTv2("b0")(torch.randn(1, 3, 24, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="b6"), "arch='b6' must be one of 'b0', 'b1'"),
        (dict(frozen_stages=5), "frozen_stages=5.*0 to 4"),
        (dict(frozen_stages=-1), "frozen_stages=-1"),
        (dict(embed_dims=24), "head_channels=16.*channels=24"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MRLAPVTv2(**options)
