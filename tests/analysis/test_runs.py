"""Statistics of paired runs against figures worked out by hand, logs, and what plots show."""

import json
import math

import pytest

from mrla_mm.analysis import comparison
from mrla_mm.analysis.curves import draw_training_curves, read_scalars, training_logs
from mrla_mm.errors import InputError

FIRST = dict.fromkeys(range(5), 0.5)


def above(*differences):
    return {seed: 0.5 + difference for seed, difference in enumerate(differences)}


def test_interval_and_p_of_differences_within_a_seed():
    """Mean 3, deviation sqrt(2.5); t with four degrees of freedom is 2.7764 at 95 %."""
    other = {**above(1, 2, 3, 4, 5), 9: 100.0}
    found = comparison.gains({"plain": FIRST, "light": other})["light"]
    assert found.differences == pytest.approx([1, 2, 3, 4, 5]) and found.mean == pytest.approx(3)
    assert (found.low, found.high) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert found.p == pytest.approx(0.01324, abs=1e-5), "the only comparison needs no correction"


def test_p_values_are_corrected_for_their_number():
    assert comparison.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert comparison.holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert comparison.holm([0.9, 0.7]) == pytest.approx([1, 1])
    unfinished, corrected = comparison.holm([math.nan, 0.01])
    assert math.isnan(unfinished) and corrected == pytest.approx(0.02)
    one = comparison.gains({"plain": FIRST, "light": above(1, 2, 3, 4, 5)})
    two = comparison.gains({"plain": FIRST, "light": above(1, 2, 3, 4, 5), "eca": above(0, 1)})
    assert two["light"].p == pytest.approx(2 * one["light"].p)


@pytest.mark.parametrize("own", [{}, above(0.1), {0: 0.51, 1: 0.51 - 1e-16, 2: 0.5 + 0.01}])
def test_nothing_is_claimed_from_less_than_two_differences_or_equal_ones(own):
    found = comparison.gains({"plain": FIRST, "light": own})["light"]
    assert all(math.isnan(value) for value in (found.low, found.high, found.p))
    assert "nan" not in comparison.make_table({"plain": FIRST, "light": own}, "AP", {})


def test_the_table():
    values = {"plain": FIRST, "light": above(0.01, 0.02, 0.03, 0.04, 0.05)}
    costs = {"plain": {"MiB": [1234.0], "seconds": [9.0, 1.0, 2.0]}, "light": {"MiB": [20.0]}}
    head, _, plain, light, *remarks = comparison.make_table(values, "AP", costs).splitlines()
    assert "over plain (95 % interval)" in head and head.endswith("| MiB | seconds |")
    assert plain == "| plain | 5 | 0.5000 ± 0.0000 |  |  | 1,234 | 2 |"
    assert "| +0.030 (+0.010 to +0.050) | 0.013 | 20 | |" in light
    assert "0.062" in remarks[1], "five seeds are too few for a sign test"
    more = {name: own | {5: own[0]} for name, own in values.items()}
    assert "sign test" not in comparison.make_table(more, "AP", costs)


def test_the_plot_shows_every_difference_and_the_interval():
    values = {"plain": FIRST, "light": above(1, 2, 3, 4, 5), "eca": above(1)}
    (axes,) = comparison.draw(comparison.gains(values), "AP").axes
    dots = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 5]
    (start, end), *_ = axes.collections[0].get_segments()
    assert list(dots[0]) == pytest.approx([1, 2, 3, 4, 5])
    assert (start[0], end[0]) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["light", "eca"]


def train_record(step, loss, epoch=1):
    terms = dict(loss=loss, loss_cls=0.6 * loss, loss_bbox=0.4 * loss)
    return dict(lr=1e-3 / step, epoch=epoch, step=step, **terms)


def val_record(epoch, ap50):
    ap = {"bbox_mAP": ap50 / 2, "bbox_mAP_50": ap50, "segm_mAP_50": ap50 - 0.1}
    return dict(step=epoch, **{f"coco/{name}": value for name, value in ap.items()})


def write_log(work_dir, stamp, records, tail=""):
    path = work_dir / stamp / "vis_data/scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def test_a_resumed_run_reads_as_one(tmp_path):
    first = [train_record(10, 3.0), val_record(1, 0.2)]
    first += [train_record(20, 2.0, epoch=2), train_record(30, 9.0, epoch=2), val_record(3, 0.9)]
    second = [train_record(20, 1.5, epoch=2), val_record(2, 0.6), train_record(40, 1.0, epoch=3)]
    write_log(tmp_path, "20260101_000000", first, tail='{"loss": 1.0, "st')
    write_log(tmp_path, "20260101_000100", second)
    write_log(tmp_path, "20260101_000200", [])  # a test of a checkpoint logs nothing here
    train, val = read_scalars(training_logs(tmp_path))
    assert [(r["step"], r["loss"]) for r in train] == [(10, 3.0), (20, 1.5), (40, 1.0)], "no 30"
    assert [(r["step"], r["coco/bbox_mAP_50"]) for r in val] == [(1, 0.2), (2, 0.6)]
    with pytest.raises(InputError, match="scalars"):
        read_scalars([write_log(tmp_path, "20260101_000300", [val_record(1, 0.5)])])


def test_the_picture_holds_curves(tmp_path):
    train = [train_record(10, 3.0), train_record(20, math.nan), train_record(30, 1)]
    figure = draw_training_curves(train, [val_record(1, 0.2), val_record(2, 0.6)])
    figure.savefig(tmp_path / "curves.png")
    losses, rate, precision = figure.axes
    assert {line.get_label() for line in losses.lines} == {"loss_bbox", "loss_cls", "loss (sum)"}
    curves = {line.get_label(): line.get_xydata().tolist() for line in precision.lines}
    assert curves["mask AP50"] == [[1, 0.1], [2, 0.5]] and len(curves) == 3 and len(rate.lines) == 1
