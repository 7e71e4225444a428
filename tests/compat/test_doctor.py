"""The doctor says what would fail, and never fails itself."""

import runpy
import subprocess
import sys

import pytest
from mmengine.config import Config

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


def test_detectors_on_resnet_do_without_mmpretrain(doctor, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mmpretrain", None)
    assert doctor.main() == 0 and "mmpretrain is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "replacement", "remedy"),
    [
        ("version", {"mmcv": "2.1.0", "mmcv-lite": "2.1.0"}.get, "pip uninstall"),
        ("run_ops", lambda device: 1 / 0, "ZeroDivisionError"),
        ("Config._get_cfg_path", lambda *_: 1 / 0, "`mmdet::` configs are not found"),
    ],
    ids=["two mmcv", "an op that fails", "no configs of mmdet"],
)
def test_faults_are_reported(doctor, part, replacement, remedy, monkeypatch, capsys):
    owner = Config if part.startswith("Config") else doctor
    monkeypatch.setattr(owner, part.removeprefix("Config."), replacement)
    assert doctor.main() == 1 and remedy in capsys.readouterr().out


def test_a_failed_self_check_of_triton_is_reported(doctor, monkeypatch, capsys):
    pytest.importorskip("triton", reason="Triton is not installed")
    from mrla_mm.ops import dispatch

    outcome = dispatch.Outcome("output in base is off by 2.0", 2.0)
    monkeypatch.setattr(dispatch, "OUTCOMES", {})
    monkeypatch.setitem(dispatch.SELF_CHECKS, "triton", lambda *key: outcome)
    monkeypatch.setenv("MRLA_OPS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor.main() and "output in base is off by 2.0" in capsys.readouterr().out


def test_it_works_where_nothing_is_installed():
    command = [sys.executable, "-I", "-S", TOOL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install torch" in done.stdout and not done.stderr
