"""The short form of `make distributed`."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    """Every variant, frozen stages, activation checkpointing, batch statistics."""
    script = ROOT / ".dev_scripts/check_distributed.py"
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, script, "--short", "--out", tmp_path]
    subprocess.run(command, env=environment, timeout=900, check=True)
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])
