"""Checkpoints appear whole, outdated ones go last, SIGTERM saves, and nothing else changes."""

import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from mrla_mm.atomic import write_atomically
from mrla_mm.engine.stopping import StopRequest
from mrla_mm.errors import InputError

from ..conftest import ROOT
from .runs import EPOCHS, ITERATIONS, LOOPS, At, build, terminate, weights

DISK_WITHOUT_SPACE = Path("/dev/full")


@pytest.fixture(autouse=True)
def idle_disk(monkeypatch):
    """Do not force files to a busy disk, which takes seconds."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def die(_=None):
    raise KeyboardInterrupt


def names(folder):
    return {path.name for path in folder.glob("*.pth*")}


def test_only_the_newest_and_the_best_checkpoints_stay(tmp_path):
    (tmp_path / "epoch_9.pth.part").write_bytes(b"left by a killed run")
    build(tmp_path, max_keep_ckpts=2, save_best="score", rule="greater").train()
    assert names(tmp_path) == {"epoch_2.pth", "epoch_3.pth", "best_score_epoch_3.pth"}
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_3.pth")


def test_a_name_without_a_number_is_written_anew(tmp_path):
    there = []
    watch = At("before_val_epoch", lambda: there.append((tmp_path / "latest.pth").exists()))
    options = dict(loop=dict(EPOCHS, max_epochs=2), save_best="score", rule="greater")
    build(tmp_path, **options, hooks=[watch], filename_tmpl="latest.pth", max_keep_ckpts=1).train()
    assert there == [True, True] and names(tmp_path) == {"latest.pth", "best_score_latest.pth"}


@pytest.mark.skipif(not DISK_WITHOUT_SPACE.exists(), reason=f"no {DISK_WITHOUT_SPACE}")
def test_a_disk_that_refuses_leaves_the_old_file_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file.part").symlink_to(DISK_WITHOUT_SPACE)
    with pytest.raises(InputError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
    with pytest.raises(InputError, match="file/below"):
        write_atomically(tmp_path / "file/below", b"")


def test_a_thread_trains_though_python_takes_no_signal_handler_there(tmp_path):
    thread = threading.Thread(target=build(tmp_path, max_keep_ckpts=1).train)
    thread.start()
    thread.join()
    assert names(tmp_path) == {"epoch_3.pth"}


def test_a_torn_write_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """Of which at most one is kept: it goes once the next one is there."""
    tear = At("before_train_iter", lambda: monkeypatch.setattr(os, "fsync", die), iteration=5)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, hooks=[tear], max_keep_ckpts=1).train()
    assert names(tmp_path) - {"epoch_2.pth.part"} == {"epoch_1.pth"}
    assert torch.load(tmp_path / "epoch_1.pth")["meta"]["epoch"] == 1
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_1.pth")


@pytest.mark.parametrize(("loop", "every"), LOOPS.values(), ids=LOOPS)
def test_sigterm_saves_and_the_run_goes_on(tmp_path, loop, every):
    stopped = build(tmp_path, loop=loop, hooks=[At("after_train_iter", terminate, 7)], **every)
    with pytest.raises(SystemExit) as caught:
        stopped.train()
    assert caught.value.code == 128 + signal.SIGTERM
    saved = torch.load(tmp_path / "interrupted.pth")
    assert saved["meta"]["iter"] == 7 and saved["optimizer"]["state"]
    assert loop is ITERATIONS or saved["meta"]["epoch"] == 1
    assert torch.equal(weights(saved["state_dict"]), weights(stopped.model.state_dict()))
    resumed = build(tmp_path, loop=loop, resume=True, **every)
    resumed.train()
    whole = build(tmp_path / "whole", loop=loop, **every)
    whole.train()
    assert resumed.iter == whole.iter and resumed.epoch == whole.epoch
    assert torch.equal(*[weights(runner.model.state_dict()) for runner in (resumed, whole)])
    assert "interrupted.pth" not in names(tmp_path)


def test_an_interrupted_epoch_of_another_length_is_repeated(tmp_path):
    with pytest.raises(SystemExit):
        build(tmp_path, hooks=[At("after_train_iter", terminate, 7)]).train()
    resumed = build(tmp_path, resume=True)
    resumed._train_dataloader.update(batch_size=1, sampler=dict(type="DefaultSampler", seed=5))
    resumed.train()
    assert resumed.iter == 7 + 2 * len(resumed.train_dataloader)
    assert resumed.train_dataloader.sampler.seed == 5, "of the sampler's own config"


@pytest.mark.parametrize(("hooks", "iteration"), [([], 3), ([dict(type="EMAHook")], 4)])
def test_sigterm_during_evaluation_ends_the_run_and_saves_what_is_not(tmp_path, hooks, iteration):
    """EMAHook puts other weights into the model for the time of an evaluation."""
    hooks = [*hooks, At("before_val_iter", terminate)]
    with pytest.raises(SystemExit):
        build(tmp_path / "epochs", hooks=hooks).train()
    assert names(tmp_path / "epochs") == {"epoch_1.pth"}, "saved before its evaluation"
    with pytest.raises(SystemExit):
        build(tmp_path, loop=ITERATIONS, hooks=hooks, interval=9, by_epoch=False).train()
    assert torch.load(tmp_path / "interrupted.pth")["meta"]["iter"] == iteration


def agree(rank, port, received):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    stop = StopRequest()
    stop.received = rank == 1
    if [stop.agreed(iteration) for iteration in (9, 10)] == [False, True]:
        received[rank] = 1


def test_all_processes_stop_if_one_is_asked_to():
    received = multiprocessing.Array("b", 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(agree, (port, received), 2, start_method="fork")
    assert list(received) == [1, 1]


# Glibc runs `pause` in a forked process before Python's own after-fork step, until a signal comes.
FORK_AND_TERMINATE_EARLY = """
import ctypes, multiprocessing, os, pathlib, signal, sys, time
from tests.engine.runs import At, build, terminate

def fork():
    libc = ctypes.CDLL(None)
    libc.__register_atfork(None, None, libc.pause, None)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[20])
    child.start()
    child.terminate()
    while child.is_alive():
        os.kill(child.pid, signal.SIGUSR1)
        child.join(0.05)
    print("exit code", child.exitcode)

hooks = [At("before_train_iter", fork, 2), At("before_train_iter", terminate, 6)]
build(pathlib.Path(sys.argv[1]), hooks=hooks).train()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="uses a function of glibc")
def test_a_process_terminated_right_after_its_fork_ends(tmp_path):
    run = [sys.executable, "-c", FORK_AND_TERMINATE_EARLY, tmp_path]
    ended = subprocess.run(run, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert f"exit code {-signal.SIGTERM}" in ended.stdout
    assert ended.returncode == 128 + signal.SIGTERM and names(tmp_path) >= {"interrupted.pth"}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_sigterm_to_a_whole_job_saves_despite_its_workers(tmp_path, start):
    """As clusters send it; loader workers that died first would end the run by an error."""
    options = f"hooks=[At('before_train_iter', kill, 6)], workers=1, start={start!r}"
    code = f"""
import multiprocessing, os, pathlib, signal, time
from tests.engine.runs import At, build

def kill():
    os.killpg(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    assert multiprocessing.active_children()

if __name__ == "__main__":
    build(pathlib.Path({str(tmp_path)!r}), {options}).train()
"""
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, cwd=ROOT, timeout=120, start_new_session=True, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "interrupted.pth")["meta"]["iter"] == 6


def test_the_signal_is_given_back_after_an_error_and_passed_on_where_it_is_too_late(tmp_path):
    """Else a process that trains one model after another would begin the next one."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    mine = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, hooks=[At("after_train_iter", die)]).train()
    assert signal.getsignal(signal.SIGTERM) is mine and not received
    build(tmp_path, hooks=[At("after_train", terminate, priority="LOWEST")]).train()
    assert received == [1]
    signal.signal(signal.SIGTERM, previous)
