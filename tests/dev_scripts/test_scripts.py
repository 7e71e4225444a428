"""The short form of `make distributed`, and the stacks that setup.py promises."""

import json
import os
import re
import subprocess
import sys

import pytest

import matrix
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


def test_the_stacks_cover_what_setup_promises():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", setup))
    locked = [stack for name, stack in matrix.STACKS.items() if name.startswith("lock")]
    assert {stack.python for stack in locked} == promised
    oldest = " ".join(matrix.STACKS["torch-oldest"].installs[0])
    for package in ("torch", "torchvision"):
        bound = re.search(rf'"{package}>=([\d.]+)"', setup)[1]
        assert f"{package}=={bound}." in oldest
