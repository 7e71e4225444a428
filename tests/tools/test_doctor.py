"""The doctor says what would fail, and never fails itself."""

import ast
import subprocess
import sys

import pytest

from ..conftest import ROOT, environment

DOCTOR = ROOT / "tools/doctor.py"


def diagnose(*command, **options):
    """Run the doctor in a process of its own; return its exit code and what it prints."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_healthy_installation_passes():
    code, printed = diagnose("-m", "mrla_mm", "doctor", env=environment())
    assert code == 0 and "FAIL" not in printed, printed
    assert "mmdet 3" in printed and "nms and roi_align on" in printed


FAULTS = {  # a file in front of the installed packages, and what is said of it
    "cv2.py": ("raise ImportError('libGL.so.1: cannot open')", "opencv-python-headless"),
    "mmcv-2.1.0.dist-info/METADATA": ("Name: mmcv\nVersion: 2.1.0", "pip uninstall -y mmcv-lite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_remedy(name, tmp_path):
    content, remedy = FAULTS[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    paths = f"{tmp_path}:{ROOT}"
    code, printed = diagnose(DOCTOR, env=environment(PYTHONPATH=paths))
    assert code == 1 and remedy in printed and "pip install" not in printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")


def test_it_works_where_nothing_is_installed():
    code, printed = diagnose("-I", "-S", DOCTOR, env={})
    assert code == 1 and "pip install torch" in printed


def test_a_folder_that_an_uninstalled_package_left_is_named(tmp_path):
    (tmp_path / "mrla_mm/ops").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/doctor.py").write_text(DOCTOR.read_text())
    _, printed = diagnose("-S", "tools/doctor.py", cwd=tmp_path, env={})
    assert f"{tmp_path}/mrla_mm holds no package" in printed


def test_an_old_python_runs_it():
    ast.parse(DOCTOR.read_text(), feature_version=(3, 8))
