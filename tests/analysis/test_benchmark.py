"""The measuring itself: ratios, fits, memory and the refusal to time what is wrong."""

import math
import weakref

import pytest
import torch
from torch import nn

from mrla_mm.analysis import benchmark
from mrla_mm.errors import InputError


def test_ratios_are_taken_within_a_round():
    """A machine that is three times slower in one round does not change the ratio."""
    assert benchmark.median_ratio([2.0, 6.0, 2.0], [1.0, 3.0, 1.0]) == 2.0
    assert benchmark.spread([2.0, 6.0, 2.0, 4.0], [1.0, 3.0, 1.0, 2.0]) == 0.0


def test_steps_are_timed_in_turn(capsys):
    order = []
    steps = {name: (lambda n=name: order.append(n)) for name in "ab"}
    seconds = benchmark.time_rounds(steps, 2, device=torch.device("cpu"))
    assert order == ["a", "b"] * 3
    assert [len(found) for found in seconds.values()] == [2, 2]


def test_exponent_of_a_power():
    assert math.isclose(benchmark.fit_exponent([1, 2, 5], [3, 12, 75]), 2)


def test_kept_bytes_count_each_storage_once_and_no_parameter():
    layer = nn.Linear(4, 8, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    assert benchmark.kept_bytes(lambda: layer(x).exp(), layer) == 4 * (2 * 4 + 2 * 8)
    assert benchmark.kept_bytes(lambda: (layer(x), layer(x)), layer) == 4 * 2 * 4


def test_weighing_keeps_nothing():
    x, made = torch.randn(4, requires_grad=True), []

    def forward():
        made.append(weakref.ref(out := x.exp()))  # exp keeps its own output for backward
        return out

    benchmark.kept_bytes(forward, [])
    assert made[0]() is None


def test_wrong_results_are_not_measured():
    expected = [torch.ones(3)]
    assert benchmark.check_parity("folded", [torch.ones(3)], expected, 1e-3) == 0
    with pytest.raises(InputError, match="folded differs from the reference by 1.0e-02"):
        benchmark.check_parity("folded", [torch.full((3,), 1.01)], expected, 1e-3)
    with pytest.raises(InputError, match="by inf"):
        benchmark.check_parity("folded", [torch.tensor([1.0, math.nan, 1.0])], expected, 1e-3)


def test_report(tmp_path):
    text = benchmark.write_report(
        tmp_path, {"device": "x"}, {"Steps": [{"ms": 1.23456}, {"ms": 2.0, "path": "folded"}]}
    )
    assert (tmp_path / "report.md").read_text() == text
    assert "| ms | path |\n| --- | --- |\n| 1.23 |  |\n| 2 | folded |" in text
    assert '"device": "x"' in (tmp_path / "report.json").read_text()
