"""Statistics of paired runs against figures worked out by hand."""

import math

import pytest

from mrla_mm.analysis.compare import statistics

FIRST = dict.fromkeys(range(5), 0.5)


def above(*differences):
    return {seed: 0.5 + difference for seed, difference in enumerate(differences)}


def test_interval_and_p_of_differences_within_a_seed():
    """Mean 3, deviation sqrt(2.5); t with four degrees of freedom is 2.7764 at 95 %."""
    other = {**above(1, 2, 3, 4, 5), 9: 100.0}
    found = statistics.gains_over_first({"plain": FIRST, "light": other})["light"]
    assert found.differences == pytest.approx([1, 2, 3, 4, 5]) and found.mean == pytest.approx(3)
    assert (found.low, found.high) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert found.p == pytest.approx(0.01324, abs=1e-5), "the only comparison needs no correction"


def test_p_values_are_corrected_for_their_number():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert statistics.holm([0.9, 0.7]) == pytest.approx([1, 1])
    unfinished, corrected = statistics.holm([math.nan, 0.01])
    assert math.isnan(unfinished) and corrected == pytest.approx(0.02)
    values = {"plain": FIRST, "light": above(1, 2, 3, 4, 5)}
    one = statistics.gains_over_first(values)
    two = statistics.gains_over_first(values | {"eca": above(0, 1)})
    assert two["light"].p == pytest.approx(2 * one["light"].p)


@pytest.mark.parametrize("own", [{}, above(0.1), {0: 0.51, 1: 0.51 - 1e-16, 2: 0.5 + 0.01}])
def test_nothing_is_claimed_from_less_than_two_differences_or_equal_ones(own):
    found = statistics.gains_over_first({"plain": FIRST, "light": own})["light"]
    assert all(math.isnan(value) for value in (found.low, found.high, found.p))
    assert "nan" not in statistics.make_table({"plain": FIRST, "light": own}, "AP", {})


def test_the_table():
    values = {"plain": FIRST, "light": above(0.01, 0.02, 0.03, 0.04, 0.10)}
    costs = {"plain": [dict(MiB=1234.0, seconds=s) for s in (9.0, 1.0, 2.0)], "light": []}
    head, _, plain, light = statistics.make_table(values, "AP", costs).splitlines()
    assert "over plain (95 % interval)" in head and head.endswith("| MiB | seconds |")
    assert plain == "| plain | 5 | 0.5000 ± 0.0000 |  |  | 1,234 | 2 |"
    assert light == "| light | 5 | 0.540 ± 0.016 | +0.040 (-0.004 to +0.084) | 0.065 |  |  |"
