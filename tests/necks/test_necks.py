"""Simple feature pyramid: levels and parameters; EfficientNet's pooling."""

import pytest
import torch
from mmcv.cnn import ConvModule
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.errors import InputError
from mrla_mm.necks import DroppedAveragePooling, SimpleFeaturePyramid


@pytest.mark.parametrize("strides", [(4, 8, 16, 32, 64), (32, 64)])
@pytest.mark.parametrize("size", [(48, 176), (80, 16)])
def test_levels_have_their_strides(strides, size):
    cfg = dict(type="SimpleFeaturePyramid", in_channels=24, out_channels=8)
    neck = MODELS.build(dict(cfg, strides=strides))
    levels = neck([torch.randn(2, 24, size[0] // 16, size[1] // 16)])
    expected = [(2, 8, -(-size[0] // stride), -(-size[1] // stride)) for stride in strides]
    assert [tuple(level.shape) for level in levels] == expected


def test_layers_and_parameters_are_those_of_vitdet():
    neck = SimpleFeaturePyramid(768, 256)
    assert [type(layer) for layer in neck.levels[0]][:4][::2] == [nn.ConvTranspose2d, nn.GELU]
    assert [type(layer) for layer in neck.levels[3]] == [nn.MaxPool2d, ConvModule, ConvModule]
    head = {c: c * 256 + 2 * 256 + 256 * 256 * 9 + 2 * 256 for c in (192, 384, 768)}
    first_half, second_half = 768 * 384 * 4 + 384, 384 * 192 * 4 + 192
    expected = 2 * first_half + 2 * 384 + second_half + head[192] + head[384] + 2 * head[768]
    assert sum(p.numel() for p in neck.parameters()) == expected


@pytest.mark.parametrize("strides", [(4, 16), (2, 4, 8), (64, 128)])
def test_strides_that_do_not_fit_are_named(strides):
    with pytest.raises(InputError, match="strides"):
        SimpleFeaturePyramid(16, 8, strides=strides)


def test_features_are_averages_dropped_in_training_alone():
    maps = (torch.rand(64, 8, 3, 5),)
    neck = DroppedAveragePooling(0.5)
    averages = maps[0].mean((2, 3))
    torch.testing.assert_close(neck.eval()(maps)[0], averages)
    dropped = neck.train()(maps)[0]
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * averages[kept])
