"""Warnings of the checks before a run, and what --resume found, reach its log file, and the console once."""

import contextlib
import io
import logging
import warnings

import pytest
import torch
from mmengine.runner import FlexibleRunner

from mrla_mm.errors import InputError
from mrla_mm.notices import collected, log_new, log_quietly

from .conftest import ROOT, tiny_options


def test_warnings_are_given_again():
    """They are given as ever, for filters to act on, an error after them notwithstanding; silent ones are not."""
    with pytest.warns(UserWarning) as caught, pytest.raises(InputError), collected() as found:
        for text in ("one", "two", "one"):
            warnings.warn(text, stacklevel=1)
        raise InputError("the end")
    assert [str(each.message) for each in caught] == ["one", "two", "one"] and found == ["one", "two"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with collected(silent=True) as found:
            warnings.warn("three", stacklevel=1)
        assert found == ["three"]
        with pytest.raises(UserWarning, match="four"), collected():
            warnings.warn("four", stacklevel=1)


def test_warnings_are_in_the_log_of_a_run(make_coco, run_tool, tmp_path):
    """Random frozen weights and class names: once in the log, once on the console."""
    root = make_coco(images=2)
    options = tiny_options("retinanet", root, "train_cfg.max_epochs=1", "model.backbone.depth=18")
    options += [
        "model.neck.in_channels=[64,128,256,512]",
        "train_dataloader.dataset.metainfo.classes=[personnel,bicycle,car]",
    ]
    options += [f"{phase}_dataloader.dataset.metainfo.classes=[personnel,bicycle,car]" for phase in ("val", "test")]
    options.append("model.test_cfg.score_thr=0.99")  # mmdet's metric ends on labels that the file has no category for
    console = io.StringIO()
    with contextlib.redirect_stdout(console), warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.warns(UserWarning) as caught:
            code, errors = run_tool(
                "train",
                ROOT / "configs/retinanet_r50_mrla_light_1x.py",
                *("--work-dir", tmp_path / "run", "--resume"),
                *("--cfg-options", *options, "model.bbox_head.num_classes=3"),
            )
    assert code == 0, errors
    (log,) = (tmp_path / "run").glob("*/*.log")
    written = log.read_text()
    given = [str(each.message) for each in caught]
    for text in ("THE BACKBONE STARTS FROM RANDOM WEIGHTS", "did you mean 'person' for 'personnel'?"):
        count = sum(text in message for message in given)
        assert count >= 1 and written.count(text) == count
        assert text not in console.getvalue() + errors, "warnings go to the console by Python's own way"
    started = f"--resume: no checkpoint in {tmp_path / 'run'}, training starts from scratch"
    assert written.count(started) == console.getvalue().count(started) == 1
    assert written.index("optim_wrapper = dict(") < written.index(started) < written.index("Epoch(train) [1][1/1]")


@pytest.mark.parametrize("silent", [False, True])
def test_warnings_of_libraries_are_given(silent):
    """A FutureWarning of a library is none of the checks' and is shown, not swallowed nor logged."""
    with pytest.warns(FutureWarning, match="removed soon"), collected(silent=silent) as messages:
        warnings.warn("removed soon", FutureWarning, stacklevel=1)
    assert messages == []


def test_any_runner_takes_them(tmp_path, capsys):
    """mmengine's FlexibleRunner has them in its log; one of the user's own, like no other, is left alone."""

    class Bare:
        def train(self):
            pass

    class Plain(Bare):
        logger, message_hub = logging.getLogger("plain"), {}

    common = dict(model=torch.nn.Linear(1, 1), work_dir=str(tmp_path), experiment_name="flexible")
    for runner in (FlexibleRunner(**common), Bare(), Plain()):
        log_quietly(runner, ["watch out"])
        log_new(runner, ["watch out", "and out"])
    (log,) = tmp_path.glob("*/*.log")
    assert log.read_text().count("watch out") == log.read_text().count("and out") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "and out", "printed, where there is no log"
