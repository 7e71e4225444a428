"""Logs of runs that were killed, resumed, started over, or whose loss is no number."""

import math

import pytest

from mrla_mm.analysis.logs import read_log, read_scalars, training_logs
from mrla_mm.errors import InputError
from tests.analysis.run_logs import train_record, val_record, write_log

TORN = '{"loss": 1.0, "st'


def steps(records):
    return [record["step"] for record in records]


def test_a_resumed_run_reads_as_one(tmp_path):
    """Epoch 2 was interrupted, and is done again from its start."""
    first = [train_record(10, 3.0), val_record(1, 0.2), train_record(20, 2.0, epoch=2), train_record(30, 9.0, epoch=2)]
    second = [train_record(20, 1.5, epoch=2), val_record(2, 0.6), train_record(40, 1.0, epoch=3)]
    write_log(tmp_path, "20260101_000000", first, tail=TORN)
    write_log(tmp_path, "20260101_000100", second)
    train, val = read_scalars(training_logs(tmp_path))
    assert [(r["step"], r["loss"]) for r in train] == [(10, 3.0), (20, 1.5), (40, 1.0)], "30 was undone"
    assert [(r["step"], r["coco/bbox_mAP_50"]) for r in val] == [(1, 0.2), (2, 0.6)]


def test_a_run_that_started_over_has_nothing_of_the_first_try(tmp_path):
    write_log(
        tmp_path, "20260101_000000", [train_record(5 * n, 9.0, epoch=n) for n in (1, 2, 3)] + [val_record(3, 0.9)]
    )
    write_log(tmp_path, "20260101_000100", [train_record(5, 1.0), val_record(1, 0.1)])
    write_log(tmp_path, "20260101_000200", [])  # a test of a checkpoint logs nothing here
    train, val = read_scalars(training_logs(tmp_path))
    assert [(r["step"], r["loss"]) for r in train] == [(5, 1.0)] and steps(val) == [1]


def test_a_torn_last_line_is_left_out_silently_and_others_with_a_warning(tmp_path, recwarn):
    log = write_log(tmp_path, "20260101_000000", [train_record(10, 3.0)], tail=TORN)
    assert steps(read_log(log)) == [10] and not recwarn.list
    lines = [TORN, "[1, 2]", "7", "null", '{"loss": 2.0}', '{"loss": 2.0, "step": "ten"}', "\0\0", ""]
    odd = "\n".join([*lines, '{"loss": 1.0, "step": 20}', ""])
    log = write_log(tmp_path, "20260101_000100", [train_record(10, 3.0)], tail=odd)
    with pytest.warns(UserWarning, match=r"7 of 10 lines are no log records, left out: 2, 3, 4, 5, 6, \.\.\."):
        assert steps(read_log(log)) == [10, 20]


def test_a_loss_that_is_no_number_is_kept(tmp_path):
    log = write_log(tmp_path, "20260101_000000", [train_record(10, 3.0), train_record(20, math.nan)])
    train, _ = read_scalars([log])
    assert steps(train) == [10, 20] and math.isnan(train[1]["loss"])


def test_logs_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(InputError, match=r"missing\.json cannot be read"):
        read_scalars([tmp_path / "missing.json"])
    log = write_log(tmp_path, "20260101_000000", [val_record(1, 0.5)])
    with pytest.raises(InputError, match="no training record"):
        read_scalars([log])
