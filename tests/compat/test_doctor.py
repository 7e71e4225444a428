import importlib.util
import runpy
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
    for text in ("mmdet 3", "ok    nms on", "ok    roi_align (max) on", "weights_only=True", "training would work"):
        assert text in printed


@pytest.mark.parametrize("name", ["torch", "torchvision", "mmcv", "mmdet", "pycocotools", "mmcv.ops"])
def test_a_missing_package_is_named_and_nothing_crashes(doctor, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1
    failures = [line for line in printed.splitlines() if "FAIL" in line]
    assert any(name in line for line in failures), printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")


def test_two_mmcv_are_reported(doctor, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: "2.1.0" if name in ("mmcv", "mmcv-lite") else None)
    assert doctor.main() == 1
    assert "mmcv-lite and mmcv are both installed" in capsys.readouterr().out


def test_missing_pkg_resources_is_reported(doctor, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pkg_resources" else find_spec(name))
    assert doctor.main() == 1
    assert 'pip install "setuptools<81"' in capsys.readouterr().out


def test_a_wrong_op_is_reported(doctor, monkeypatch, capsys):
    monkeypatch.setitem(doctor.PROBES, "nms", lambda torch, device: (1.0, 2.0))
    assert doctor.main() == 1
    assert "gives 1.0 instead of 2.0" in capsys.readouterr().out
