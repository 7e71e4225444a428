"""The quick start end to end, at a size that only shows that its parts fit together."""

import signal
import subprocess
import sys
import time

import cv2
import pytest

from ..conftest import ROOT


@pytest.mark.slow
def test_terminated_it_goes_on_to_train_evaluate_and_draw(tmp_path):
    command = [sys.executable, str(ROOT / "tools/quickstart.py"), "--epochs", "4"]
    command += ["--num-train", "8", "--num-val", "4"]
    results = tmp_path / "work_dirs/quickstart"
    log = results / "train.log"
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while not log.is_file() or "Epoch(train)" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert (results / "train/interrupted.pth").is_file()

    resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in log.read_text()
    assert "Epoch(train) [4]" in resumed.stdout and "box AP50" in resumed.stdout
    assert cv2.imread(str(results / "gallery.jpg")).std() > 5
