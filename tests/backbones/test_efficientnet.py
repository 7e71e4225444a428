"""MRLAEfficientNet: where layer attention stands, its drop path, and mmdet's options."""

from itertools import chain

import pytest
import torch
from mmdet.models.backbones import EfficientNet

from mrla_mm.backbones import MRLAEfficientNet

from .common import assert_same_levels, has_shortcut, load_plain, randomize_zero_init


@pytest.mark.parametrize("arch", ["b0", "es", "em", "el"])
def test_layer_attention_follows_the_blocks_with_a_shortcut_and_only_those(arch):
    blocks, plain = (chain(*net(arch).layers[1:-1]) for net in (MRLAEfficientNet, EfficientNet))
    first_in_stage, seen = True, 0
    for block, plain_block in zip(blocks, plain, strict=True):
        shortcut = has_shortcut(plain_block)
        assert (block.mrla is not None) is shortcut
        if shortcut:
            assert block.mrla.attention.first_in_stage is first_in_stage
            assert block.mrla.norm.eps == 1e-3  # that of mmdet's norms
            seen += 1
        first_in_stage = not shortcut
    assert seen > 3


@pytest.mark.parametrize("path", ["naive", "fused"])
def test_a_block_and_its_layer_attention_are_dropped_together(path, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", path)
    torch.manual_seed(0)
    options = dict(drop_path_rate=0.5, out_indices=(5,), norm_eval=True)
    backbone = randomize_zero_init(MRLAEfficientNet("b0", **options)).double().train()
    block = backbone.layers[5][3]
    assert block.drop_path_rate == pytest.approx(0.5 * 14 / 15)  # mmdet's rule: linear in depth
    x = torch.randn(64, 192, 2, 3, dtype=torch.float64)
    (out,) = block(x)
    dropped = (out == x).flatten(1).all(1)
    assert 16 < dropped.sum() < 48

    residual = x
    for name in ("expand_conv", "depthwise_conv", "se", "linear_conv"):
        residual = getattr(block, name)(residual)
    after = x + residual / (1 - block.drop_path_rate)
    attended = block.mrla.norm(block.mrla.attention(after, x)[0]) / (1 - block.drop_path_rate)
    torch.testing.assert_close(out[~dropped], (after + attended)[~dropped])
    assert torch.equal(block.eval()(x)[0], block(x)[0])


GROUP_NORM = dict(type="GN", num_groups=4)
OPTIONS = [dict(arch="es", out_indices=(1, 3, 5)), dict(arch="em", out_indices=(2, 4))]
OPTIONS += [dict(norm_cfg=GROUP_NORM, out_indices=(0, 6)), dict(act_cfg=dict(type="ReLU"))]


@pytest.mark.parametrize("options", [*OPTIONS, dict(norm_eval=True)], ids=str)
def test_host_options_work_as_in_mmdet(options):
    backbone = MRLAEfficientNet(**options).train()
    plain = load_plain(EfficientNet(**options), backbone)
    assert_same_levels(backbone, plain, torch.randn(2, 3, 65, 33), tolerance=1e-4)
