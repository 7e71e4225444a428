"""Metrics of configs over seeds: paired differences, their intervals, a table and a plot.

Runs of a seed see the same images and start from shared weights, so a config is judged by its
differences to the first one within a seed. The interval is Student's t over seeds, p its test
against no difference, corrected for the number of comparisons by Holm's method (1979).
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

BySeed = Mapping[int, float]  # a metric of each run of a config


class Gain(NamedTuple):
    """Differences to another config within a seed, with the interval and p value of their mean.

    Interval and p are NaN for fewer than two differences, and where all are equal.
    """

    differences: list[float]
    low: float = math.nan  # 95 % interval of the mean
    high: float = math.nan
    p: float = math.nan

    @property
    def mean(self) -> float:
        """Mean difference, NaN for none."""
        return statistics.mean(self.differences or [math.nan])


def gains_over_first(values: Mapping[str, BySeed]) -> dict[str, Gain]:
    """Return what each config but the first gains over the first, with corrected p values."""
    first, *others = values
    gains = {name: paired_gain(values[name], values[first]) for name in others}
    corrected = holm([gain.p for gain in gains.values()])
    return {name: gains[name]._replace(p=p) for name, p in zip(gains, corrected, strict=True)}


def paired_gain(values: BySeed, baseline: BySeed) -> Gain:
    """Return what a config gains over another, with the p value of this comparison alone."""
    seeds = [seed for seed in values if seed in baseline]
    # Rounding errors of floats would make a tiny spread, and so a tiny p, of equal differences.
    differences = [round(values[seed] - baseline[seed], 9) for seed in seeds]
    if len(set(differences)) < 2:
        return Gain(differences)
    test = ttest_1samp(differences, 0)
    return Gain(differences, *test.confidence_interval(0.95), test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected by Holm's method; a NaN stays NaN and counts as a comparison."""
    order = np.argsort(p_values)  # NaN comes last
    corrected = np.array(p_values)
    scaled = np.arange(len(order), 0, -1) * corrected[order]
    corrected[order] = np.minimum(1, np.maximum.accumulate(scaled))
    return corrected.tolist()


def decimals_for(error: float) -> int:
    """Return how many decimals show two digits of an error."""
    return max(0, 1 - math.floor(math.log10(error or 0.001)))


def describe(values: Sequence[float]) -> str:
    """Return mean and standard error as text, empty for no values."""
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else ""
    error = statistics.stdev(values) / len(values) ** 0.5
    decimals = decimals_for(error)
    return f"{statistics.mean(values):.{decimals}f} ± {error:.{decimals}f}"


def describe_gain(gain: Gain) -> list[str]:
    """Return two cells of a table: mean with interval, and p; empty where there is none."""
    if math.isnan(gain.p):
        return [f"{gain.mean:+.4g}" if gain.differences else "", ""]
    decimals = decimals_for(gain.high - gain.mean)
    mean, low, high = (f"{x:+.{decimals}f}" for x in (gain.mean, gain.low, gain.high))
    return [f"{mean} ({low} to {high})", f"{gain.p:.2g}"]


def describe_cost(runs: Sequence[Mapping[str, float]], key: str) -> str:
    """Return the median cost of runs as text, empty for no runs."""
    if not runs:
        return ""
    median = statistics.median(run[key] for run in runs)
    return f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"


def make_table(
    values: Mapping[str, BySeed], metric: str, costs: Mapping[str, Sequence[Mapping[str, float]]]
) -> str:
    """Return a Markdown row for each config: its metric, its gain over the first, median costs.

    `costs` has a mapping for each run of a config, all with the same keys.
    """
    gains = gains_over_first(values)
    cost_names = list(next(itertools.chain.from_iterable(costs.values()), {}))
    over = f"over {next(iter(values))} (95 % interval)"
    head = ["config", "runs", metric, over, "corrected p", *cost_names]
    lines = [head, ["---"] * len(head)]
    for name, by_seed in values.items():
        gain_cells = describe_gain(gains.get(name, Gain([])))
        cost_cells = [describe_cost(costs[name], key) for key in cost_names]
        value = describe([*by_seed.values()])
        lines.append([name, str(len(by_seed)), value, *gain_cells, *cost_cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(gains: Mapping[str, Gain], label: str) -> Figure:
    """Plot gains, each in a row of its name: a dot for each seed, mean and 95 % interval below."""
    figure = Figure(figsize=(6.4, 1.2 + 0.5 * len(gains)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", lw=0.8)
    for row, gain in enumerate(gains.values()):
        axes.plot(gain.differences, [row] * len(gain.differences), "o", color="C0", alpha=0.6)
        radius = gain.high - gain.mean
        axes.errorbar(gain.mean, row + 0.2, xerr=radius, fmt="D", color="C3", ms=4, capsize=4)
    axes.set_yticks(range(len(gains)), [*gains])
    axes.set_ylim(len(gains) - 0.5, -0.5)
    figure.supxlabel(f"{label}:\nevery seed, mean, 95 % interval", fontsize=10)
    return figure
