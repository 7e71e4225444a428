"""The quick start end to end, at a size that only shows that its parts fit together."""

import signal
import subprocess
import sys
import time

import cv2
import pytest

from ..conftest import ROOT


@pytest.mark.slow
def test_it_trains_evaluates_draws_and_resumes(tmp_path):
    command = [sys.executable, str(ROOT / "tools/quickstart.py"), "--num-train", "8"]
    command += ["--num-val", "4", "--epochs"]
    run = dict(cwd=tmp_path, capture_output=True, text=True)
    first = subprocess.run([*command, "1"], **run)
    assert first.returncode == 0, first.stderr
    steps = [f"[{number}/4]" for number in (1, 2, 3, 4)]
    assert [step for step in steps if step not in first.stdout] == []
    assert "eta:" in first.stdout and "box AP50" in first.stdout
    results = tmp_path / "work_dirs/quickstart"
    gallery = results / "gallery.jpg"
    assert cv2.imread(str(gallery)).std() > 5
    gallery.unlink()
    assert sum(path.suffix in (".jpg", ".png") for path in results.rglob("*")) == 0

    second = subprocess.run([*command, "2"], **run)
    assert second.returncode == 0, second.stderr
    assert "Epoch(train) [2]" in second.stdout and "Epoch(train) [1]" not in second.stdout
    assert "continuing from" in (results / "train.log").read_text()
    assert gallery.is_file()


@pytest.mark.slow
def test_at_sigterm_its_training_saves_and_ends(tmp_path):
    command = [sys.executable, str(ROOT / "tools/quickstart.py"), "--num-train", "8"]
    log = tmp_path / "work_dirs/quickstart/train.log"
    with subprocess.Popen([*command, "--num-val", "2"], cwd=tmp_path) as process:
        while not log.is_file() or "Epoch(train)" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: the run ends" in log.read_text()
    assert (tmp_path / "work_dirs/quickstart/train/interrupted.pth").is_file()
