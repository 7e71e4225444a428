"""The short form of `make crash`, and the stacks that setup.py promises."""

import json
import os
import re
import subprocess
import sys

import pytest

import matrix
from tests.conftest import ROOT


def run(script, folder, *arguments):
    """Run a script that writes to a folder and passes."""
    command = [sys.executable, ROOT / ".dev_scripts" / script, "--out", folder, *arguments]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    options = dict(env=environment, capture_output=True, text=True, timeout=900)
    ended = subprocess.run(command, **options, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    """Every variant, frozen stages, checkpointing, batch statistics; no parameter is unused."""
    run("check_distributed.py", tmp_path, "--short")
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])


def test_the_stacks_cover_what_setup_promises():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", setup))
    locks = [stack for name, stack in matrix.STACKS.items() if name.startswith("lock")]
    assert {stack.python for stack in locks} == promised
    oldest = " ".join(matrix.STACKS["torch-oldest"].installs[0])
    for package in ("torch", "torchvision"):
        bound = re.search(rf'"{package}>=([\d.]+)"', setup)[1]
        assert f"{package}=={bound}." in oldest
