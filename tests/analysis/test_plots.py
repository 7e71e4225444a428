"""Training curves from mmengine's logs, those of runs that diverged or have not validated yet included."""

import math

import cv2
import numpy as np
import pytest

from mrla_mm.analysis.logs import training_logs
from mrla_mm.analysis.plots import plot_training_curves
from tests.analysis.run_logs import train_record, val_record, write_log


def test_the_picture_holds_curves(tmp_path):
    write_log(tmp_path, "20260101_000000", [train_record(10, 3.0), train_record(20, 2.0), val_record(1, 0.2)])
    write_log(tmp_path, "20260101_000100", [train_record(30, 1.5, epoch=2), val_record(2, 0.6)])
    out = plot_training_curves(training_logs(tmp_path), tmp_path / "new/curves.png")
    picture = cv2.imread(str(out))
    height, width = picture.shape[:2]
    assert width > height > 300
    colours = {"tab:blue": (180, 119, 31), "tab:orange": (14, 127, 255)}  # BGR, box AP and mask AP
    validation = picture[:, int(0.7 * width) :]
    for colour in colours.values():
        assert (np.abs(validation.astype(int) - colour).max(-1) < 12).sum() > 50


def without_rate(record):
    """A record as hooks of other packages may log it."""
    return {key: value for key, value in record.items() if key != "lr"}


@pytest.mark.parametrize(
    "records",
    [
        [train_record(10, 3.0)],
        [train_record(10, 3.0), train_record(20, math.nan), train_record(30, math.inf)],
        [train_record(10, math.nan)],
        [without_rate(train_record(10, 3.0))],
        [train_record(10, 3.0), val_record(1, math.nan)],
    ],
    ids=["no validation yet", "diverged", "never a number", "no learning rate", "no AP"],
)
def test_odd_runs_are_drawn(records, tmp_path):
    log = write_log(tmp_path, "20260101_000000", records)
    assert plot_training_curves([log], tmp_path / "curves.png").stat().st_size > 5000
