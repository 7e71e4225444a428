"""Measuring itself: ratios, turns, memory."""

import torch
from torch import nn

import measure


def test_ratios_are_taken_within_a_round():
    """A machine that is three times slower in one round does not change the ratio."""
    assert measure.ratios([2.0, 6.0, 2.0, 4.0], [1.0, 3.0, 1.0, 2.0]) == [2.0] * 4
    assert measure.spread([2.0] * 4) == 0.0 and measure.spread([1.0, 2.0]) == 0.0


def test_steps_are_timed_in_turn():
    order = []
    steps = {name: (lambda n=name: order.append(n)) for name in "ab"}
    seconds = measure.time_rounds(steps, 2, device=torch.device("cpu"), queued=True)
    assert order == ["a", "b"] * 3
    assert [len(found) for found in seconds.values()] == [2, 2]


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    layer = nn.Linear(4, 8, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    assert measure.saved_bytes(lambda: layer(x).exp(), layer) == 4 * (2 * 4 + 2 * 8)
    assert measure.saved_bytes(lambda: (layer(x), layer(x)), layer) == 4 * 2 * 4
