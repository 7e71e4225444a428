"""The doctor says what would fail, and never fails itself."""

import ast
import importlib
import subprocess
import sys

import pytest
from mmengine.config import Config

import mrla_doctor as doctor

from ..conftest import ROOT


def test_a_healthy_installation_passes(capsys):
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 0 and "FAIL" not in printed, printed
    for text in ("mmdet 3", "nms and roi_align on", "training would work"):
        assert text in printed


@pytest.mark.parametrize("name", ["torch", "mmdet", "mmcv.ops"])
def test_a_missing_package_is_named_and_nothing_crashes(monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1
    assert any(name in line for line in printed.splitlines() if "FAIL" in line), printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mmpretrain", None)  # detectors on ResNet do without
    assert doctor.main() == 0 and "mmpretrain is not installed" in capsys.readouterr().out


BROKEN = {
    "mmcv": (ImportError("libGL.so.1: cannot open"), "repair the failures above"),
    "cv2": (ImportError("libGL.so.1: cannot open"), "opencv-python-headless"),
    "mmdet.models": (TypeError("NoneType takes no arguments"), "transformers < 4.56"),
    "mmdet": (AssertionError("MMCV==2.2.0 is incompatible"), "the version that it asks for"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_installed_and_broken_is_not_installed_again(monkeypatch, capsys, name):
    error, remedy = BROKEN[name]
    real = importlib.import_module

    def import_module(module):
        if module == name:
            raise error
        return real(module)

    monkeypatch.setattr(importlib, "import_module", import_module)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1 and remedy in printed and "pip install" not in printed


@pytest.mark.parametrize(
    ("part", "replacement", "remedy"),
    [
        ("version", {"mmcv": "2.1.0", "mmcv-lite": "2.1.0"}.get, "pip uninstall"),
        ("run_ops", lambda device: 1 / 0, "ZeroDivisionError"),
        ("Config._get_cfg_path", lambda *_: 1 / 0, "`mmdet::` configs are not found"),
    ],
    ids=["two mmcv", "an op that fails", "no configs of mmdet"],
)
def test_faults_are_reported(part, replacement, remedy, monkeypatch, capsys):
    owner = Config if part.startswith("Config") else doctor
    monkeypatch.setattr(owner, part.removeprefix("Config."), replacement)
    assert doctor.main() == 1 and remedy in capsys.readouterr().out


@pytest.mark.parametrize("command", ["-I -S tools/doctor.py", "-S -m mrla_doctor"])
def test_it_works_where_nothing_is_installed(command):
    command = [sys.executable, *command.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={})
    assert done.returncode == 1 and "pip install torch" in done.stdout and not done.stderr


def test_a_folder_that_an_uninstalled_package_left_is_named(tmp_path):
    (tmp_path / "mrla_mm/ops").mkdir(parents=True)
    (tmp_path / "mrla_doctor.py").write_text((ROOT / "mrla_doctor.py").read_text())
    command = [sys.executable, "-S", "-m", "mrla_doctor"]
    options = dict(capture_output=True, text=True, check=False, cwd=tmp_path, env={})
    done = subprocess.run(command, **options)
    assert f"{tmp_path}/mrla_mm holds no package" in done.stdout


def test_an_old_python_runs_it_and_is_told_so(monkeypatch, capsys):
    ast.parse((ROOT / "mrla_doctor.py").read_text(), feature_version=(3, 8))
    assert all(isinstance(each, str) for each in doctor.main.__annotations__.values()), "not run"
    monkeypatch.setattr(sys, "version_info", (3, 9))
    assert doctor.main() == 1 and "Python 3.10" in capsys.readouterr().out
