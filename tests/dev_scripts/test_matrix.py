"""The stacks of matrix.py are those that setup.py promises, and its table says what the reports say."""

import json
import re

import matrix
from tests.conftest import ROOT


def test_the_stacks_cover_what_setup_promises():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", setup))
    assert {stack.python for name, stack in matrix.STACKS.items() if name.startswith("lock")} == promised
    oldest = " ".join(matrix.STACKS["torch-oldest"].installs[0])
    for package in ("torch", "torchvision"):
        bound = re.search(rf'"{package}>=([\d.]+)"', setup)[1]
        assert f"{package}=={bound}." in oldest


def test_results_become_a_table(tmp_path):
    report = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
    (tmp_path / "onedl.xml").write_text(report)
    found = matrix.counts(tmp_path / "onedl.xml")
    assert found == dict(passed=5, failed=2, skipped=2)
    result = dict(stack="onedl", date="2026-01-01", outcome="failed", install_s=7, test_s=80, versions=dict(torch="2"))
    (tmp_path / "onedl.json").write_text(json.dumps(result | found))
    missing = dict(stack="lock-py310", date="2026-01-01", outcome="not installed")
    (tmp_path / "lock-py310.json").write_text(json.dumps(missing))
    rows = matrix.table(tmp_path).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| lock-py310", "| onedl"]
    assert rows[1] == "| onedl | torch 2 | 5 | 2 | 2 | 7 s, 80 s | 2026-01-01 |"
