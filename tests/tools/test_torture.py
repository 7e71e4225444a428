"""The short form of `make torture`: killed while it saves and while it trains, and on a full disk, a run continues."""

import json
import os
import subprocess
import sys

import pytest

from ..conftest import ROOT


@pytest.mark.smoke
def test_torture(tmp_path):
    tool = [sys.executable, ROOT / "tools/torture.py", "--kills", "2", "--terms", "0", "--full", "1", "--out", tmp_path]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    ended = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "torture.json").read_text())
    assert report["figures"]["all"] == "3 of 3" and report["figures"]["torn_checkpoints"] == 0
    assert [row["ended_by"] for row in report["trials"]] == ["SIGKILL", "SIGKILL", "full disk"]
