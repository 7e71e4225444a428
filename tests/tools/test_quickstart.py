"""The quick start end to end, at a size that only shows that its parts fit together."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

REPOSITORY = Path(__file__).parents[2]
SIZE = ("--num-train", "8", "--num-val", "4", "--epochs", "2")


def quickstart(folder, *arguments):
    command = [sys.executable, str(REPOSITORY / "tools/quickstart.py"), *SIZE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.smoke
def test_it_trains_then_resumes_then_keeps_what_is_there(tmp_path):
    first = quickstart(tmp_path)
    assert first.returncode == 0, first.stderr
    assert [f"[{number}/4]" in first.stdout for number in (1, 2, 3, 4)] == [True] * 4
    assert "data/shapes written" in first.stdout
    assert "training finished" in first.stdout
    assert "eta:" in first.stdout
    results = tmp_path / "work_dirs/quickstart"
    assert len(list((results / "pictures").glob("*.png"))) == 4
    for picture in ("gallery.png", "curves.png"):
        assert cv2.imread(str(results / picture)).std() > 5

    # As if the run had been killed in its second epoch.
    (results / "train/epoch_2.pth").unlink()
    (results / "train/last_checkpoint").write_text(str(results / "train/epoch_1.pth"))
    state = json.loads((results / "quickstart.json").read_text())
    (results / "quickstart.json").write_text(json.dumps({**state, "checkpoint": None}))
    second = quickstart(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "was there and intact, kept" in second.stdout
    assert "training resumed and finished" in second.stdout
    assert "Epoch(val) [2]" in second.stdout
    assert "Epoch(val) [1]" not in second.stdout

    third = quickstart(tmp_path, "--min-ap50", "1.01")
    assert third.returncode == 1
    assert "finished training kept" in third.stdout
    assert "below --min-ap50 1.01" in third.stderr
