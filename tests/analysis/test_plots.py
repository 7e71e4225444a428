"""Training curves from mmengine's logs, those of interrupted and resumed runs included."""

import json

import cv2
import numpy as np
import pytest

from mrla_mm.analysis.plots import plot_training_curves, read_scalars, training_logs
from mrla_mm.errors import InputError


def train_record(step, loss):
    return {"lr": 1e-3 / step, "loss": loss, "loss_cls": 0.6 * loss, "loss_bbox": 0.4 * loss, "epoch": 1, "step": step}


def val_record(epoch, ap50):
    return {"coco/bbox_mAP": ap50 / 2, "coco/bbox_mAP_50": ap50, "coco/segm_mAP_50": ap50 - 0.1, "step": epoch}


def write_log(work_dir, stamp, records, tail=""):
    path = work_dir / stamp / "vis_data/scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


@pytest.fixture
def work_dir(tmp_path):
    first = [train_record(10, 3.0), train_record(20, 2.0), val_record(1, 0.2), train_record(30, 9.0)]
    second = [train_record(30, 1.5), train_record(40, 1.0), val_record(2, 0.6)]
    write_log(tmp_path, "20260101_000000", first, tail='{"loss": 1.0, "st')
    write_log(tmp_path, "20260101_000100", second)
    return tmp_path


def test_a_resumed_run_reads_as_one(work_dir):
    train, val = read_scalars(training_logs(work_dir))
    assert [(r["step"], r["loss"]) for r in train] == [(10, 3.0), (20, 2.0), (30, 1.5), (40, 1.0)]
    assert [(r["step"], r["coco/bbox_mAP_50"]) for r in val] == [(1, 0.2), (2, 0.6)]


def test_the_picture_holds_curves(work_dir, tmp_path):
    out = plot_training_curves(training_logs(work_dir), tmp_path / "new/curves.png")
    picture = cv2.imread(str(out))
    height, width = picture.shape[:2]
    assert width > height > 300
    colours = {"tab:blue": (180, 119, 31), "tab:orange": (14, 127, 255)}  # BGR, box AP and mask AP
    validation = picture[:, int(0.7 * width) :]
    for colour in colours.values():
        assert (np.abs(validation.astype(int) - colour).max(-1) < 12).sum() > 50


def test_a_run_without_validation_yet_is_drawn(tmp_path):
    log = write_log(tmp_path, "20260101_000000", [train_record(10, 3.0)])
    assert plot_training_curves([log], tmp_path / "curves.png").stat().st_size > 5000


def test_logs_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(InputError, match=r"missing\.json does not exist"):
        read_scalars([tmp_path / "missing.json"])
    log = write_log(tmp_path, "20260101_000000", [val_record(1, 0.5)])
    with pytest.raises(InputError, match="no training record"):
        read_scalars([log])
