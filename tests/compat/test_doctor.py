"""The doctor says what would fail, and never fails itself."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "doctor.py"


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(TOOL))["load_doctor"]()


def test_a_healthy_installation_passes(doctor, capsys):
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 0 and "FAIL" not in printed, printed
    for text in ("mmdet 3", "roi_align on", "weights_only=True", "training would work"):
        assert text in printed


@pytest.mark.parametrize("name", ["torch", "torchvision", "mmcv", "mmdet", "mmcv.ops"])
def test_a_missing_package_is_named_and_nothing_crashes(doctor, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1
    assert any(name in line for line in printed.splitlines() if "FAIL" in line), printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")


def test_two_mmcv_are_reported(doctor, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "version", lambda name: "2.1.0" if name in ("mmcv", "mmcv-lite") else None)
    assert doctor.main() == 1
    assert "pip uninstall -y mmcv-lite mmcv" in capsys.readouterr().out


def test_missing_pkg_resources_is_reported(doctor, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pkg_resources" else find_spec(name))
    assert doctor.main() == 1
    assert 'pip install "setuptools<81"' in capsys.readouterr().out


def test_a_wrong_op_is_reported(doctor, monkeypatch, capsys):
    monkeypatch.setitem(doctor.PROBES, "nms", lambda torch, device: (1.0, 2.0))
    assert doctor.main() == 1
    assert "1.0 instead of 2.0" in capsys.readouterr().out


def test_it_works_where_nothing_is_installed():
    done = subprocess.run([sys.executable, "-I", "-S", TOOL], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install torch" in done.stdout and not done.stderr
