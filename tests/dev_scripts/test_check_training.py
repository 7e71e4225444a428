"""check_training.py exits with a code that a script can rely on."""

import pytest

import check_training
from mrla_mm import cli

GOOD = dict(finite=True, fell=True, exit=0)


@pytest.mark.parametrize(("row", "code"), [(GOOD, 0), ({**GOOD, "fell": False}, 2), (dict(exit=1), 2)])
def test_a_failed_training_sets_the_exit_code(row, code, monkeypatch, tmp_path):
    """A loss that rose, or a run that ended before its first step; the report is written in any case."""
    monkeypatch.setattr(check_training, "train", lambda *_: dict(config="mine", precision="fp32", **row))
    assert cli.run(check_training.main, ["mine", "--precisions", "fp32", "--out", str(tmp_path)]) == code
    assert (tmp_path / "report.md").is_file()
