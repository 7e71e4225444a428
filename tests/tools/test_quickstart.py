"""The quick start end to end, at a size that only shows that its parts fit together."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

from ..conftest import ROOT, load_tool

SIZE = ("--num-train", "8", "--num-val", "4", "--epochs", "2")


def quickstart(folder, *arguments):
    command = [sys.executable, str(ROOT / "tools/quickstart.py"), *SIZE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_it_trains_then_resumes_then_keeps_what_is_there(tmp_path):
    first = quickstart(tmp_path)
    assert first.returncode == 0, first.stderr
    assert (
        all(f"[{number}/4]" in first.stdout for number in (1, 2, 3, 4)) and "eta:" in first.stdout
    )
    results = tmp_path / "work_dirs/quickstart"
    assert len(list((results / "pictures").glob("*.png"))) == 4
    for picture in ("gallery.png", "curves.png"):
        assert cv2.imread(str(results / picture)).std() > 5

    # As if the run had been killed in its second epoch.
    (results / "train/epoch_2.pth").unlink()
    (results / "train/last_checkpoint").write_text(str(results / "train/epoch_1.pth"))
    state = json.loads((results / "quickstart.json").read_text())
    (results / "quickstart.json").write_text(json.dumps({**state, "finished": False}))
    second = quickstart(tmp_path, "--min-ap50", "1.01")
    assert second.returncode == 1 and "1.01" in second.stderr, second.stderr
    assert "Epoch(val) [2]" in second.stdout and "Epoch(val) [1]" not in second.stdout


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return `run(*argv)`, which runs the quick start with stand-ins for its tools, and returns the tools it ran."""
    module, ran = load_tool("quickstart"), []

    def run_tool(name, *arguments, log_file):
        ran.append(name)
        folder = Path(arguments[arguments.index("--work-dir") + 1])
        (folder / "time").mkdir(parents=True, exist_ok=True)
        if name == "train":
            (folder / "epoch_8.pth").touch()
            (folder / "last_checkpoint").write_text("/wherever/epoch_8.pth")
        else:
            (folder / "time/time.json").write_text('{"coco/bbox_mAP_50": 0.6}')

    monkeypatch.setattr(module, "run_tool", run_tool)
    monkeypatch.setattr(module, "draw", lambda *args: None)
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        ran.clear()
        module.main(["--num-train", "4", "--num-val", "2", "--size", "64", *argv])
        return list(ran)

    return run


def test_a_finished_training_is_kept_until_something_changes(run):
    assert run() == ["train", "test"]
    assert run() == ["test"]
    for change in (["--fresh"], ["--epochs", "3"]):
        assert run(*change) == ["train", "test"], change
        assert run(*[word for word in change if word != "--fresh"]) == ["test"], change


def test_data_alone(run):
    assert run("--data-only", "--data", "here") == []
    assert len(list(Path("here/train2017").iterdir())) == 4 and not Path("work_dirs").exists()
