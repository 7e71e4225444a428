"""Logs of runs that were killed, resumed or diverged, and their curves."""

import json
import math

import cv2
import numpy as np
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
    """Epoch 2 was interrupted, and is done again from its start."""
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
    log = [train_record(10, 3.0), train_record(20, math.nan), train_record(30, 1)]
    log += [val_record(1, 0.2), val_record(2, 0.6)]
    write_log(tmp_path, "20260101_000000", log)
    draw_training_curves(*read_scalars(training_logs(tmp_path))).savefig(tmp_path / "curves.png")
    picture = cv2.imread(str(tmp_path / "curves.png")).astype(int)
    validation = picture[:, int(0.7 * picture.shape[1]) :]
    for colour in ((180, 119, 31), (14, 127, 255)):  # BGR, box AP and mask AP
        assert (np.abs(validation - colour).max(-1) < 12).sum() > 50
