"""The short form of `make crash`: killed while it saves and while it trains, and on a full disk, a run continues."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_crashed_runs_resume(tmp_path):
    script = [sys.executable, ROOT / ".dev_scripts/crash_test.py", "--out", tmp_path]
    script += ["--kills", "2", "--terms", "0", "--full", "1"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "crash_test.json").read_text())
    assert report["figures"]["all"] == "3 of 3"
    assert [row["ended_by"] for row in report["trials"]] == ["SIGKILL", "SIGKILL", "full disk"]
