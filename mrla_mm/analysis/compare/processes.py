"""The processes of a comparison: each does a run, with its output in the run's log."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

import torch

from mrla_mm import cli
from mrla_mm.analysis.compare.plan import Run
from mrla_mm.analysis.compare.run import train_and_test
from mrla_mm.errors import InputError

LOG = "run.log"
START = "---- an attempt starts ----"  # in the log


def run_process(run: Run) -> None:
    """Do a run as a process of its own, with its own process group and the output in its log."""
    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    with (run.folder / LOG).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(cli.run(lambda _: train_and_test(run)))


def end_with_parent() -> None:
    """Wait for the parent's end, however it ends, and kill this process group."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def find_slots(jobs: int | None) -> list[dict[str, str]]:
    """Return a slot for each run that may be under way at a time: its environment variables."""
    gpus = torch.cuda.device_count()
    if not gpus:
        jobs = jobs or 1
        threads = max(1, os.cpu_count() // jobs)
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * jobs
    if jobs and jobs > gpus:
        raise InputError(f"--jobs {jobs}: there are {gpus} GPUs, each for one run at a time")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[: jobs or gpus]]


def start_process(run: Run, slot: dict) -> multiprocessing.Process:
    """Start a run in a slot, with a line in its log."""
    run.folder.mkdir(exist_ok=True)
    with (run.folder / LOG).open("a") as log:
        log.write(f"\n{START}\n")
    os.environ.update(slot)  # which the new process inherits
    process = multiprocessing.get_context("spawn").Process(target=run_process, args=(run,))
    process.start()
    return process


def describe_failure(process: multiprocessing.Process, run: Run) -> str:
    """Return what went wrong in a run that has ended; an empty text for nothing."""
    process.join()
    if process.exitcode < 0:
        return signal.Signals(-process.exitcode).name
    if process.exitcode == 0:
        return ""
    last_line = (run.folder / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {process.exitcode}" if last_line == START else last_line


def run_all(runs: Sequence[Run], slots: Sequence[dict]) -> Iterator[tuple[Run, str]]:
    """Run all, as many at a time as there are slots; yield each that ends, and its failure.

    Closing the generator kills running processes; the next call resumes them from their last
    checkpoint.
    """
    waiting = list(runs)
    free = list(slots)
    running = {}
    try:
        while waiting or running:
            while waiting and free:
                slot = free.pop()
                run = waiting.pop(0)
                process = start_process(run, slot)
                running[process.sentinel] = process, run, slot
            for sentinel in wait(running):
                process, run, slot = running.pop(sentinel)
                free.append(slot)
                yield run, describe_failure(process, run)
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()
