"""The neck between EfficientNet and its classifier."""

import torch

from mrla_mm.necks import DroppedAveragePooling


def test_features_are_averages_dropped_in_training_alone():
    maps = (torch.rand(64, 8, 3, 5),)
    neck = DroppedAveragePooling(0.5)
    averages = maps[0].mean((2, 3))
    torch.testing.assert_close(neck.eval()(maps)[0], averages)
    dropped = neck.train()(maps)[0]
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * averages[kept])
