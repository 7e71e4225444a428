"""The short form of `make distributed`."""

import json

import pytest

from tests.conftest import ROOT, run_python


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    run_python(ROOT / ".dev_scripts/check_distributed.py", "--short", "--out", tmp_path)
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])
