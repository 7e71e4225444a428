"""Runs of a comparison: each trains and tests a config from a seed, in a process of its own."""

import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from numbers import Number
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed
from torch import Tensor

from mrla_mm import cli
from mrla_mm.atomic import write_atomically
from mrla_mm.compare.plan import RESULT, TRAINED, Run, config_file
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model
from mrla_mm.training import last_checkpoint, resume_from, train

LOG = "run.log"
START = "---- an attempt starts ----"  # in the log


def initial_weights(cfg: Config, seed: int) -> tuple[dict[str, Tensor], set[str]]:
    """Return the weights that a model starts with, and the keys of those that the seed decides."""
    set_random_seed(seed + 1)
    other = build_model(cfg)
    other.init_weights()
    set_random_seed(seed)
    model = build_model(cfg)
    model.init_weights()
    state, different = model.state_dict(), other.state_dict()
    return state, {key for key in state if not torch.equal(state[key], different[key])}


def shared_weights(cfg: Config, first: Config, seed: int) -> dict[str, Tensor]:
    """Return a model's initial weights, with the first model's random tensors where both have them.

    Weights that are constant or pretrained in either model stay as its own config says.
    """
    weights, drawn = initial_weights(cfg, seed)
    of_first, drawn_by_first = initial_weights(first, seed)
    for key in drawn & drawn_by_first:
        if weights[key].shape == of_first[key].shape:
            weights[key] = of_first[key]
    return weights


class ComparedRunHook(Hook):
    """Sets shared initial weights, seeds every iteration, and writes what the training cost.

    `OVERRIDES` of the plan are the other half of what makes runs repeatable.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        """Let a new run start from the first config's random weights.

        mmengine calls init_weights after this, and loads `load_from` after that.
        """
        if runner.cfg.resume:
            return
        first = Config(runner.cfg.share_weights_with)
        weights = shared_weights(runner.cfg, first, runner.seed)
        runner.model.init_weights = lambda: runner.model.load_state_dict(weights)

    def before_train(self, runner: Runner) -> None:
        """Let the loader's workers take their seeds from the main process, anew each epoch."""
        runner.train_dataloader.worker_init_fn = None

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed the first iteration of an epoch, which may be that of a resumed run."""
        seed_iteration(runner.seed, runner.iter)

    def after_train_iter(self, runner: Runner, *_: object, **__: object) -> None:
        """Seed the next iteration: all models see the same images, however much they draw."""
        seed_iteration(runner.seed, runner.iter + 1)

    def after_train(self, runner: Runner) -> None:
        """Write what the training cost, which also says that it has ended."""
        seconds, _ = runner.message_hub.get_scalar("train/time").data
        costs = {"parameters": sum(p.numel() for p in runner.model.parameters())}
        costs["seconds an iteration"] = float(statistics.median(seconds))
        costs["peak memory, MiB"] = peak_memory()
        write_atomically(Path(runner.work_dir) / TRAINED, json.dumps(costs).encode())


def seed_iteration(seed: int, iteration: int) -> None:
    """Seed an iteration: by seed and iteration alone, so that a resumed run draws the same."""
    set_random_seed((1_000_003 * seed + iteration) % 2**32)


def peak_memory() -> float:
    """Return the most memory in MiB that torch had on a GPU, or else this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def train_and_test(run: Run) -> None:
    """Bring a run to its end: train unless that is done, test, and write the result."""
    folder = run.folder
    cfg = read_config(str(config_file(folder.parent)), {"randomness.seed": run.seed})
    cfg.launcher = "none"
    if not (folder / TRAINED).is_file():
        cfg.work_dir = str(folder)
        resume_from(cfg, last_checkpoint(folder))
        train(cfg, [ComparedRunHook()])
    metrics = test(cfg, folder)
    costs = json.loads((folder / TRAINED).read_text())
    result = dict(config=run.config, seed=run.seed, metrics=metrics, costs=costs)
    write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())


def test(cfg: Config, folder: Path) -> dict[str, float]:
    """Return the metrics of the last checkpoint in a folder; InputError if either is missing."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None or not Path(checkpoint).is_file():
        raise InputError(f"{folder} has no checkpoint any more: delete it to train again")
    cfg.update(load_from=checkpoint, resume=False, work_dir=str(folder / "test"))
    cfg.visualizer = None  # mmengine would reuse that of the training, which is closed
    evaluated = cli.build_runner(cfg, "test").test()
    metrics = {key: float(value) for key, value in evaluated.items() if isinstance(value, Number)}
    if not metrics:
        raise InputError("the test returns no metric; mmdet does so if nothing is detected")
    return metrics


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
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        if jobs and jobs > gpus:
            raise InputError(f"--jobs {jobs}: there are {gpus} GPUs, each for one run at a time")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[: jobs or gpus]]
    jobs = jobs or 1
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * jobs


def fault_of(process: multiprocessing.Process, run: Run) -> str:
    """Return what went wrong in a run that has ended; an empty text for nothing."""
    process.join()
    if process.exitcode < 0:
        return signal.Signals(-process.exitcode).name
    if process.exitcode == 0:
        return ""
    last_line = (run.folder / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {process.exitcode}" if last_line in ("", START) else last_line


def run_all(runs: Sequence[Run], slots: Sequence[dict]) -> Iterator[tuple[Run, str]]:
    """Run all, as many at a time as there are slots; yield each that ends, and its fault.

    Closing the generator kills running processes; the next call resumes them from their last
    checkpoint.
    """
    waiting = list(runs)
    free = list(slots)
    running = {}
    spawn = multiprocessing.get_context("spawn")
    try:
        while waiting or running:
            while waiting and free:
                slot = free.pop()
                run = waiting.pop(0)
                run.folder.mkdir(exist_ok=True)
                with (run.folder / LOG).open("a") as log:
                    log.write(f"\n{START}\n")
                os.environ.update(slot)  # which the new process inherits
                process = spawn.Process(target=run_process, args=(run,))
                process.start()
                running[process.sentinel] = process, run, slot
            for sentinel in wait(running):
                process, run, slot = running.pop(sentinel)
                free.append(slot)
                yield run, fault_of(process, run)
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()
