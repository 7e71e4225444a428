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
    for text in ("mmdet 3", "roi_align on", "Checkpoints", "training would work"):
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


FAULTS = {
    "pip uninstall": ("version", {"mmcv": "2.1.0", "mmcv-lite": "2.1.0"}.get),
    "setuptools<81": ("importlib.util.find_spec", find_spec),
    "1.0 instead of 2.0": ("PROBES", {"nms": lambda torch, device: (1.0, 2.0)}),
}


@pytest.mark.parametrize("remedy", FAULTS)
def test_faults_are_reported(doctor, remedy, monkeypatch, capsys):
    part, replacement = FAULTS[remedy]
    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(importlib.util if owner else doctor, name, replacement)
    assert doctor.main() == 1 and remedy in capsys.readouterr().out


def test_it_works_where_nothing_is_installed():
    done = subprocess.run(
        [sys.executable, "-I", "-S", TOOL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "pip install torch" in done.stdout and not done.stderr
