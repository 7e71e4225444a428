"""tools/check_training.py: the exit code that a script goes by."""

import pytest

from mrla_mm import cli

from ..conftest import load_tool

GOOD = dict(finite=True, fell=True, exit=0)


@pytest.mark.parametrize(("row", "code"), [(GOOD, 0), ({**GOOD, "fell": False}, 2), (dict(exit=1), 2)])
def test_a_training_that_fails_is_seen_from_outside(row, code, monkeypatch, tmp_path, capsys):
    """A loss that rose, or a run that ended before its first step; the report is written in any case."""
    tool = load_tool("check_training")
    monkeypatch.setattr(tool, "train", lambda name, precision, args: dict(config=name, precision=precision, **row))
    assert cli.run(tool.main, ["mine", "--precisions", "fp32", "--out", str(tmp_path)]) == code
    assert ("no finite, falling loss: mine in fp32" in capsys.readouterr().err) == bool(code)
    assert (tmp_path / "report.md").is_file()
