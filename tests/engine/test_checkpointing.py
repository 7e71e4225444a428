"""Checkpoints appear whole, outdated ones go last, and a resumed run repeats the one that was not interrupted."""

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from mrla_mm.errors import InputError
from mrla_mm.weights import AtomicCheckpointHook
from mrla_mm.weights.atomic import write_atomically
from mrla_mm.weights.stopping import NOTICE, StopRequest

from ..conftest import ROOT


@pytest.fixture(autouse=True)
def idle_disk(monkeypatch):
    """Forcing files to a busy disk takes seconds; the tests of a full one put their own function here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class NoisyData(BaseDataset):
    """Samples that depend on every generator a pipeline may draw from."""

    def load_data_list(self):
        return [dict(value=float(number)) for number in range(7)]

    def prepare_data(self, idx):
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.tensor([self.get_data_info(idx)["value"], noise])


class NoisyModel(BaseModel):
    """A model whose training draws random numbers too."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 4), nn.Dropout(0.5)

    def forward(self, *samples, mode):
        score = self.dropout(self.linear(torch.stack(samples))).mean() * np.random.rand()
        return dict(loss=score) if mode == "loss" else [score]


class NoisyMetric(Evaluator):
    """An evaluation that improves every time and draws random numbers."""

    def __init__(self):
        super().__init__([])
        self.calls = 0

    def process(self, **_):
        torch.rand(1), np.random.rand()

    def evaluate(self, size):
        self.calls += 1
        return dict(score=self.calls)


def build(work_dir, *, loop, workers=0, seed=3, hooks=(), resume=False, **checkpoint):
    loader = dict(dataset=NoisyData(), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    torch.manual_seed(0)
    endless = "InfiniteSampler" if loop.get("max_iters") else "DefaultSampler"
    runner = Runner(
        model=NoisyModel(),
        work_dir=str(work_dir),
        train_dataloader=dict(loader, sampler=dict(type=endless, shuffle=True)),
        train_cfg=loop,
        val_dataloader=dict(loader, dataset=NoisyData(), sampler=dict(type="DefaultSampler", shuffle=False)),
        val_cfg=dict(),
        val_evaluator=[],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=dict(type="AtomicCheckpointHook", **checkpoint)),
        custom_hooks=list(hooks),
        randomness=dict(seed=seed),
        default_scope="mmengine",
        experiment_name=f"{work_dir.name}{random.SystemRandom().random()}",
        resume=resume,
    )
    runner._val_evaluator = NoisyMetric()
    runner.train = lambda: train(runner)
    return runner


def train(runner):
    """Train, and end the loader workers at once: torch waits five seconds for each when it drops two loaders."""
    try:
        Runner.train(runner)
    finally:
        for child in multiprocessing.active_children():
            runner.train_dataloader.worker_init_fn.release()
            runner.val_dataloader.worker_init_fn.release()
            child.terminate()


def weights(runner):
    return torch.cat([value.flatten() for value in runner.model.state_dict().values()])


class Die(Hook):
    """Ends a run at an iteration as its cluster would, or at once."""

    priority = "LOW"

    def __init__(self, at, term=True, everyone=False):
        self.at, self.term, self.everyone = at, term, everyone

    def after_train_iter(self, runner, *_, **__):
        if runner.iter + 1 == self.at:
            if not self.term:
                raise KeyboardInterrupt
            (os.killpg if self.everyone else os.kill)(os.getpid(), signal.SIGTERM)


EPOCHS = dict(by_epoch=True, max_epochs=3)
ITERATIONS = dict(type="IterBasedTrainLoop", max_iters=10, val_interval=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("loop", "every"),
    [(EPOCHS, dict(interval=1)), (ITERATIONS, dict(interval=2, by_epoch=False))],
    ids=["epoch", "iter"],
)
def test_resumed_run_ends_with_the_same_weights(tmp_path, loop, every, workers):
    whole = build(tmp_path / "whole", loop=loop, workers=workers, **every)
    whole.train()
    other = build(tmp_path / "other", loop=loop, workers=workers, seed=4, **every)
    other.train()
    assert not torch.equal(weights(whole), weights(other)), "the seed decides, so equality below means something"
    for at, term in ((6, True), (6, False)):
        name = f"{at}{term}"
        with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
            build(tmp_path / name, loop=loop, workers=workers, hooks=[Die(at, term)], **every).train()
        assert not term or caught.value.code == 128 + signal.SIGTERM
        resumed = build(tmp_path / name, loop=loop, workers=workers, resume=True, **every)
        resumed.train()
        assert torch.equal(weights(whole), weights(resumed))
        assert not (tmp_path / name / "interrupted.pth").exists()


@pytest.mark.parametrize(("loop", "done"), [(EPOCHS, "epoch 3 of 3"), (ITERATIONS, "iter 10 of 10")])
def test_a_complete_run_that_is_resumed_says_so(tmp_path, loop, done):
    """In its last line; one that has something left does not."""
    options = dict(interval=1, by_epoch=loop is EPOCHS)
    build(tmp_path, loop=loop, **options).train()
    again = build(tmp_path, loop=loop, resume=True, **options)
    before = weights(again)
    again.train()
    logs = [path.read_text() for path in sorted(tmp_path.glob("*/*.log"))]
    last = logs[-1].splitlines()[-1]
    assert f"the run in {tmp_path} is complete: {done}; nothing was trained" in last
    assert f"raise train_cfg.max_{done.split()[0]}s" in last and not torch.equal(weights(again), before), "loaded"
    longer = {key: 12 if key.startswith("max_") else value for key, value in loop.items()}
    build(tmp_path, loop=longer, resume=True, **options).train()
    assert sum(path.read_text().count("is complete") for path in tmp_path.glob("*/*.log")) == 1


def test_the_number_of_workers_changes_nothing(tmp_path):
    runs = [build(tmp_path / str(workers), loop=EPOCHS, workers=workers, interval=1) for workers in (0, 1, 2)]
    for runner in runs:
        runner.train()
    assert all(torch.equal(weights(runs[0]), weights(runner)) for runner in runs)


def test_a_process_with_persistent_workers_ends_and_they_live_through_a_signal_to_all(tmp_path):
    code = "import sys, pathlib, mrla_mm; from tests.weights.test_checkpointing import *; "
    code += (
        "run = build(pathlib.Path(sys.argv[1]), loop=EPOCHS, workers=1, hooks=[Die(6, everyone=True)], interval=1); "
    )
    code += "keep = run; Runner.train(run)"
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, timeout=120, start_new_session=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "interrupted.pth", weights_only=True)["meta"]["iter"] == 6


def test_workers_of_a_killed_process_end(tmp_path):
    """Also those that wait to hand over a batch larger than a pipe, which outlive their parent with torch alone."""
    code = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
from mrla_mm.weights.replay import shield_workers
loader = DataLoader(range(64), collate_fn=lambda numbers: bytes(1 << 20), num_workers=2, persistent_workers=True)
shield_workers(loader)
batches = iter(loader)
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL  # and returned at all: the workers hold the other end of the pipe
    assert len(killed.stdout.split()) == 2


def test_a_run_without_a_configured_seed_resumes_in_its_data_order(tmp_path):
    with pytest.raises(SystemExit):
        build(tmp_path, loop=EPOCHS, seed=None, hooks=[Die(6)], interval=1).train()
    first = torch.load(tmp_path / "interrupted.pth", weights_only=True)["meta"]
    resumed = build(tmp_path, loop=EPOCHS, seed=None, resume=True, interval=1)
    resumed.train()
    assert resumed.train_dataloader.sampler.seed == first["replay"]["sampler_seed"]
    assert resumed.seed == first["seed"]
    assert resumed.iter == 12


def test_outdated_checkpoints_go_after_the_new_one_is_there(tmp_path, monkeypatch):
    there, real = {}, os.replace

    def watched(source, target):
        there.setdefault(target.name, {path.name for path in tmp_path.glob("*.pth")})
        return real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    build(tmp_path, loop=EPOCHS, interval=1, max_keep_ckpts=1, save_best="score", rule="greater").train()
    assert {path.name for path in tmp_path.glob("*.pth")} == {"epoch_3.pth", "best_score_epoch_3.pth"}
    assert "epoch_1.pth" in there["epoch_2.pth"]
    assert "best_score_epoch_1.pth" in there["best_score_epoch_2.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_3.pth")


def test_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "epoch_1.pth"
    target.write_bytes(b"old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mrla_mm.weights.atomic.os.fsync", full)
    with pytest.raises(InputError, match=r"epoch_1.pth cannot be written: No space left on device .* --resume"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_full_disk_while_saving_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    runner = build(tmp_path, loop=EPOCHS, interval=1, max_keep_ckpts=1)
    real = write_atomically

    def fill(path, content):
        if str(path).endswith("epoch_2.pth"):
            monkeypatch.setattr("mrla_mm.weights.atomic.os.fsync", lambda _: os.write(full, b"x"))
        real(path, content)

    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("mrla_mm.weights.atomic.write_atomically", fill)
    with pytest.raises(InputError, match="No space left on device"):
        runner.train()
    assert [path.name for path in tmp_path.glob("*.pth*")] == ["epoch_1.pth"]
    assert torch.load(tmp_path / "epoch_1.pth", weights_only=True)["meta"]["epoch"] == 1


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    with pytest.raises(SystemExit):
        build(tmp_path, loop=EPOCHS, hooks=[Die(9)], interval=1, max_keep_ckpts=1).train()
    (tmp_path / "epoch_9.pth.part").write_bytes(b"half")
    build(tmp_path, loop=EPOCHS, resume=True, interval=1, max_keep_ckpts=1).train()
    assert [path.name for path in tmp_path.glob("*.pth*")] == ["epoch_3.pth"]


class End(Hook):
    """Ends a run at a point of its life, by an exception or a signal."""

    priority = "LOWEST"

    def __init__(self, point, error=None):
        def act(*_, **__):
            if error is None:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise error

        setattr(self, point, act)


@pytest.fixture
def heard():
    """The number of SIGTERMs that reached the handler which a process had before its training."""
    count = []
    previous = signal.signal(signal.SIGTERM, lambda *_: count.append(1))
    yield count
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("point", ["before_run", "before_train", "after_train_iter", "after_val_epoch", "after_train"])
def test_the_signal_is_given_back_however_a_run_ends(tmp_path, heard, point, error):
    """mmengine has no hook for an exception; whoever starts the run, its process must stay one that SIGTERM ends."""
    mine = signal.getsignal(signal.SIGTERM)
    hooks = [End(point, error)] if error is not None else []
    ended = pytest.raises(type(error)) if error is not None else contextlib.nullcontext()
    with ended:
        build(tmp_path, loop=EPOCHS, hooks=hooks, interval=1).train()
    assert signal.getsignal(signal.SIGTERM) is mine and not heard
    signal.raise_signal(signal.SIGTERM)
    assert heard == [1]


def test_trainings_one_after_another_in_a_process(tmp_path, heard):
    """As in a notebook: one that fails, one that is stopped, the same again, and one that runs to its end."""
    mine = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="first"):
        build(tmp_path / "a", loop=EPOCHS, hooks=[End("after_train_iter", RuntimeError("first"))], interval=1).train()
    stopped = build(tmp_path / "b", loop=EPOCHS, hooks=[Die(6)], interval=1)
    with pytest.raises(SystemExit) as caught:
        stopped.train()
    assert caught.value.code == 128 + signal.SIGTERM and (tmp_path / "b/interrupted.pth").is_file()
    stopped._hooks = [hook for hook in stopped._hooks if not isinstance(hook, Die)]
    stopped.train()
    assert (tmp_path / "b/epoch_3.pth").is_file(), "a run stopped once does not stop again by the same signal"
    whole = build(tmp_path / "c", loop=EPOCHS, interval=1)
    whole.train()
    assert whole.iter == 12 and not heard and signal.getsignal(signal.SIGTERM) is mine


def test_a_signal_too_late_to_stop_the_run_is_passed_on(tmp_path, heard):
    """Else a process that trains one model after another would begin the next one, and be killed in it."""
    build(tmp_path, loop=EPOCHS, hooks=[End("after_train")], interval=1).train()
    assert heard == [1] and (tmp_path / "epoch_3.pth").is_file()


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), InputError("disk full"), KeyboardInterrupt()], ids=repr
)
def test_a_signal_is_not_lost_when_the_run_ends_by_an_error(tmp_path, heard, error, capsys):
    """A loop over trainings that catches their errors must not go on to the next one: it was told to end."""

    def both(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        raise error

    def run():
        hook = End("after_train_iter")
        hook.priority, hook.after_train_iter = "VERY_HIGH", both
        build(tmp_path, loop=EPOCHS, hooks=[hook], interval=1).train()

    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error and heard == [1], "a handler of the caller's own decides"
    mine = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            run()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, mine)
    assert caught.value.code == 128 + signal.SIGTERM and caught.value.__cause__ is error
    said = capsys.readouterr().err
    assert str(error) in said and ("Traceback" in said) is not isinstance(error, InputError)


def test_the_signal_is_confirmed_at_once(tmp_path, capfd):
    """In the log and on the console, before the iteration ends, once, and from within a write to either of them."""
    seen = []

    def watch(runner, *_, **__):
        console = next(each for each in runner.logger.handlers if type(each) is logging.StreamHandler)
        console.setStream(Interrupted(console.stream))
        for _ in range(2):
            runner.logger.info("an iteration of minutes")
        (log,) = tmp_path.glob("*/*.log")
        seen.append(log.read_text().count(NOTICE))

    class Interrupted:
        """A stream that the signal reaches while it is being written to."""

        def __init__(self, stream):
            self.stream, self.busy, self.fileno, self.flush = stream, False, lambda: 1, stream.flush

        def write(self, text):
            assert not self.busy, "entered twice"
            self.busy = True
            signal.raise_signal(signal.SIGTERM)
            self.stream.write(text)
            self.busy = False

    hook = End("after_train_iter")
    hook.priority, hook.after_train_iter = "VERY_HIGH", watch
    with pytest.raises(SystemExit):
        build(tmp_path, loop=EPOCHS, hooks=[hook], interval=1).train()
    (log,) = tmp_path.glob("*/*.log")
    lines = [line for line in log.read_text().splitlines() if "SIGTERM" in line]
    assert seen == [1] and len(lines) == 2 and re.fullmatch(rf"[\d/]+ [\d:]+ - mmengine - WARNING - {NOTICE}", lines[0])
    assert capfd.readouterr().out.count(NOTICE) == 1


def test_a_process_forked_off_a_run_ends_by_its_signal():
    """A metric's pool, for example, is ended by SIGTERM; it has nothing to save, and the run goes on."""
    fork, stop = multiprocessing.get_context("fork"), StopRequest()
    ready = fork.Event()

    def work():
        ready.set()
        time.sleep(20)

    with stop.listening():
        child = fork.Process(target=work)
        child.start()
        assert ready.wait(20)
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM and not stop.received


def test_a_run_in_a_thread_leaves_the_signal_alone(tmp_path, heard):
    mine, seen = signal.getsignal(signal.SIGTERM), []
    watch = End("before_train_iter")
    watch.before_train_iter = lambda *_, **__: seen.append(signal.getsignal(signal.SIGTERM))
    thread = threading.Thread(target=lambda: build(tmp_path, loop=EPOCHS, hooks=[watch], interval=1).train())
    thread.start(), thread.join()
    assert len(seen) == 12 and set(seen) == {mine}


def test_hook_is_registered_at_the_root_and_refuses_what_it_would_ignore():
    assert HOOKS.get("AtomicCheckpointHook") is AtomicCheckpointHook
    with pytest.raises(InputError, match="backend_args"):
        AtomicCheckpointHook(file_client_args=dict(backend="disk"))
