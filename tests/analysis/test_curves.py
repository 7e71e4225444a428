"""Logs of runs that were killed, resumed or diverged, and their curves."""

import json
import math

import pytest

from mrla_mm.analysis.curves import draw_training_curves, read_scalars, training_logs
from mrla_mm.errors import InputError


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
