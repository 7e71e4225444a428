"""The doctor says what would fail, and never fails itself."""

import importlib.util
import runpy
import subprocess
import sys

import pytest

from ..conftest import ROOT

TOOL = ROOT / "tools/doctor.py"


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(TOOL))["load_doctor"]()


def test_a_healthy_installation_passes(doctor, capsys):
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 0 and "FAIL" not in printed, printed
    for text in ("mmdet 3", "nms and roi_align on", "Paths", "training would work"):
        assert text in printed


@pytest.mark.parametrize("name", ["torch", "mmdet", "mmcv.ops"])
def test_a_missing_package_is_named_and_nothing_crashes(doctor, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1
    assert any(name in line for line in printed.splitlines() if "FAIL" in line), printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")


def find_spec(name, original=importlib.util.find_spec):
    return None if name == "pkg_resources" else original(name)


@pytest.mark.parametrize(
    ("part", "replacement", "remedy"),
    [
        ("version", {"mmcv": "2.1.0", "mmcv-lite": "2.1.0"}.get, "pip uninstall"),
        ("importlib.util.find_spec", find_spec, "setuptools<81"),
        ("run_ops", lambda device: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["two mmcv", "no pkg_resources", "an op that fails"],
)
def test_faults_are_reported(doctor, part, replacement, remedy, monkeypatch, capsys):
    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(importlib.util if owner else doctor, name, replacement)
    assert doctor.main() == 1 and remedy in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (("", 3e-7), "triton (MRLA_OPS asks for it); largest difference in the self-check 3.0e-07"),
        (("output in base is off by 2.0", 2.0), "output in base is off by 2.0"),
    ],
    ids=["right", "wrong"],
)
def test_the_self_check_of_triton_is_reported(doctor, outcome, text, monkeypatch, capsys):
    pytest.importorskip("triton", reason="Triton is not installed")
    from mrla_mm.ops import dispatch, self_check

    monkeypatch.setattr(dispatch, "OUTCOMES", {})
    monkeypatch.setattr(self_check, "self_check", lambda *key: self_check.Outcome(*outcome))
    monkeypatch.setenv("MRLA_OPS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor.main() == bool(outcome[0])
    printed = capsys.readouterr().out
    assert text in printed and f"Triton {doctor.version('triton')}" in printed


def test_it_works_where_nothing_is_installed():
    command = [sys.executable, "-I", "-S", TOOL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install torch" in done.stdout and not done.stderr
