"""The quick start end to end, at a size that only shows that its parts fit together."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

from mrla_mm.errors import InputError

REPOSITORY = Path(__file__).parents[2]
SIZE = ("--num-train", "8", "--num-val", "4", "--epochs", "2")


def quickstart(folder, *arguments):
    command = [sys.executable, str(REPOSITORY / "tools/quickstart.py"), *SIZE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
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
    second = quickstart(tmp_path, "--min-ap50", "1.01")
    assert second.returncode == 1, second.stderr
    assert "below --min-ap50 1.01" in second.stderr
    assert "was there and intact, kept" in second.stdout
    assert "training resumed and finished" in second.stdout
    assert "Epoch(val) [2]" in second.stdout
    assert "Epoch(val) [1]" not in second.stdout


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("quickstart_tool", REPOSITORY / "tools/quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_finished_training_is_kept_until_something_changes(module, tmp_path, monkeypatch):
    runs = []

    def trained(arguments, log_file, *, shown):
        runs.append(arguments)
        folder = Path(arguments[arguments.index("--work-dir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "epoch_8.pth").touch()
        (folder / "last_checkpoint").write_text(str(folder / "epoch_8.pth"))

    monkeypatch.setattr(module, "run_tool", trained)

    (tmp_path / "work").mkdir()

    def train(*arguments):
        args = module.parse_args([*arguments, "--data", str(tmp_path / "data")])
        return module.train(module.load_config(args), args, tmp_path / "work")

    checkpoint, message = train()
    assert (checkpoint.name, message, len(runs)) == ("epoch_8.pth", "training finished", 1)
    assert train() == (checkpoint, "finished training kept")
    assert len(runs) == 1
    for number, change in enumerate((["--fresh"], ["--seed", "3"], ["--num-train", "9"], ["--epochs", "3"]), 2):
        assert train(*change)[1] == "training finished", change
        assert len(runs) == number
    for number, damaged in enumerate(("", "[]", "{}"), 6):
        (tmp_path / "work/quickstart.json").write_text(damaged)
        assert train()[1] == "training finished", damaged
        assert len(runs) == number


def test_ctrl_c_says_how_to_go_on(module, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "main", interrupted)
    assert module.cli.run(module.resumable, []) == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on from the last complete epoch\n"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--seed", "-1"], "--seed -1: give a number from 0"),
        (["--seed", str(2**32)], "--seed 4294967296"),
        (["--epochs", "0"], "--epochs 0: give a positive number"),
        (["--num-train", "0"], "num_train=0"),
        (["--work-dir", __file__], "test_quickstart.py cannot be made"),
    ],
)
def test_wrong_arguments_end_before_anything_is_done(module, arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        module.main([*arguments, "--data", "data"])
    assert expected in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_tool_that_fails_is_reported_with_the_end_of_its_output(module, tmp_path, capfd):
    script = tmp_path / "tool.py"
    script.write_text("print('Epoch(train) 1'); print('noise'); raise SystemExit(3)")
    with pytest.raises(InputError, match="ended with code 3"):
        module.run_tool([str(script)], tmp_path / "log/tool.log", shown=module.PROGRESS)
    out, err = capfd.readouterr()
    assert "Epoch(train) 1" in out
    assert "noise" not in out
    assert "noise" in err
    assert (tmp_path / "log/tool.log").read_text() == "Epoch(train) 1\nnoise\n"
