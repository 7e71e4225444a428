#!/usr/bin/env python
"""Train and test several configs from several seeds each, and compare what they reach.

  compare.py plain.py light.py eca.py --seeds 5 --jobs 2

Writes runs.csv, table.md and a plot to --out. The same command again goes on where an earlier one
was ended, skips what is finished and retries what failed. Runs of a seed draw the same initial
weights, as far as the first config's model has them too, and see the same images.
"""

import argparse
import csv
import json
import math
import multiprocessing
import os
import resource
import runpy
import signal
import statistics
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import connection
from numbers import Number
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import EpochBasedTrainLoop, set_random_seed

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.engine.checkpointing import write_atomically
from mrla_mm.engine.stopping import TERMINATED
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

TOOLS = Path(__file__).resolve().parent


class Run(NamedTuple):
    """A config's run from a seed."""

    name: str  # of the config
    seed: int
    config: Path
    folder: Path

    def __str__(self):
        return f"{self.name}, seed {self.seed}"

    def result(self):
        """Return what the run has reached and cost, None unless it is finished."""
        file = self.folder / "result.json"
        return json.loads(file.read_text()) if file.is_file() else None


def parse_args(argv):
    """Parse the command line."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare.py", description=__doc__, formatter_class=kind)
    names = "config files, or package::name of packed ones; the others are compared with the first"
    parser.add_argument("configs", nargs="+", metavar="config", help=names)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each config (default: 5)")
    jobs = "runs at a time (default: one a GPU, or one on a CPU, whose cores they share)"
    parser.add_argument("--jobs", type=int, help=jobs)
    metric = "of table and plot, e.g. coco/bbox_mAP (default: the first that the test reports)"
    parser.add_argument("--metric", help=metric)
    out = dict(type=Path, default=Path("work_dirs/compare"))
    parser.add_argument("--out", **out, help="folder for all results (default: %(default)s)")
    own = "draw the initial weights of each config on their own"
    parser.add_argument("--independent", action="store_true", help=own)
    size = dict(type=int, nargs=2, metavar=("H", "W"))
    shape = "image for multiply-adds (default: 800 1280; classifiers 224 224)"
    parser.add_argument("--shape", **size, help=shape)
    cli.add_option_argument(parser)
    args = parser.parse_args(argv)
    if args.seeds < 1 or (args.jobs or 1) < 1:
        parser.error("--seeds and --jobs begin at 1")
    return args


def initial_weights(cfg: Config, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights that a config's model starts with, those of its init_cfg included."""
    set_random_seed(seed)
    model = build_model(cfg)
    model.init_weights()
    return model.state_dict()


def shared_weights(cfg: Config, first: Config, seed: int) -> dict[str, torch.Tensor]:
    """Return a model's initial weights; what it draws as the first model does, that one draws.

    What no seed changes, constants and pretrained weights, is as the config says.
    """
    own, other_own, drawn, other_drawn = (
        initial_weights(each, number) for each in (cfg, first) for number in (seed, seed + 1)
    )
    for key, value in own.items():
        agree = key in drawn and drawn[key].shape == value.shape
        is_random = agree and not torch.equal(value, other_own[key])
        if is_random and not torch.equal(drawn[key], other_drawn[key]):
            own[key] = drawn[key]
    return own


class ComparedRunHook(Hook):
    """Shared initial weights, random numbers that a resumed run repeats, progress and costs."""

    priority = "VERY_HIGH"

    def __init__(self, first, progress):
        self.first = first
        self.progress = progress
        self.costs = {}

    def before_run(self, runner):
        """Exchange the weights that a new run starts with; `load_from` comes later and wins."""
        if self.first is None or runner.cfg.resume:
            return
        model = runner.model
        weights = shared_weights(runner.cfg, read_config(str(self.first), {}), runner.seed)
        init_weights = model.init_weights

        def init_shared_weights():
            init_weights()
            model.load_state_dict(weights)

        model.init_weights = init_shared_weights

    def before_train(self, runner):
        """Let the workers of each epoch take their seeds from the main process."""
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            runner.train_dataloader.worker_init_fn = None
        self.progress[:] = [runner.iter / runner.max_iters] * 2

    def before_train_epoch(self, runner):
        """Seed the epoch."""
        set_random_seed((1_000_003 * runner.seed + runner.iter) % 2**32)

    def after_train_iter(self, runner, *_, **__):
        """Seed the next iteration: models that draw unequally often see the same images."""
        set_random_seed((1_000_003 * runner.seed + runner.iter + 1) % 2**32)
        self.progress[1] = (runner.iter + 1) / runner.max_iters

    def after_train(self, runner):
        """Note the median time of an iteration and the peak memory, of the GPU if there is one."""
        seconds, _ = runner.message_hub.get_scalar("train/time").data
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        self.costs = dict(
            iteration_seconds=float(statistics.median(seconds)), peak_megabytes=peak / 2**20
        )


def is_number(value):
    """Whether a metric's value is one number, of Python, numpy or torch."""
    return isinstance(value, Number) or getattr(value, "shape", None) == ()


def train_and_test(run, first, progress):
    """Train and test with the tools; write the result."""
    seed = f"randomness.seed={run.seed}"
    train, test = (runpy.run_path(str(TOOLS / f"{name}.py")) for name in ("train", "test"))
    trained = run.folder / "trained.json"
    if not trained.is_file():
        hook = ComparedRunHook(first, progress)
        arguments = [str(run.config), "--work-dir", str(run.folder), "--resume"]
        train["main"]([*arguments, "--cfg-options", seed], [hook])
        write_atomically(trained, json.dumps(hook.costs).encode())
    checkpoint = train["newest_checkpoint"](run.folder)
    if checkpoint is None:
        raise InputError(f"the training has left no checkpoint in {run.folder}")
    arguments = [str(run.config), str(checkpoint), "--work-dir", str(run.folder / "test")]
    # mmengine would give it the training's visualizer, whose back ends are closed.
    found = test["main"]([*arguments, "--cfg-options", seed, "visualizer=None"])
    metrics = {key: float(value) for key, value in found.items() if is_number(value)}
    if not metrics:
        raise InputError("the test reports no metric; mmdet does so if nothing is detected")
    result = dict(metrics=metrics, **json.loads(trained.read_text()))
    write_atomically(run.folder / "result.json", json.dumps(result, indent=1).encode())


def end_with_parent():
    """Kill this process and its loaders' workers once the parent is gone, even by SIGKILL."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def work(run, first, progress):
    """Be the process of a run: in a group of its own, with its output in run.log."""
    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    with (run.folder / "run.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(cli.run(lambda _: train_and_test(run, first, progress)))


def write_config(cfg: Config, file: Path, first: str | None) -> None:
    """Write the config that the runs read; raise InputError if there are runs of another one."""
    cfg.compare = dict(weights_shared_with=first)
    cfg.randomness = dict(cfg.get("randomness") or {}, seed=0)
    cfg.train_dataloader.persistent_workers = False  # what they draw could not be repeated
    checkpoints = (cfg.get("default_hooks") or {}).get("checkpoint")
    if checkpoints:
        checkpoints.setdefault("max_keep_ckpts", 1)
        if checkpoints.type == "CheckpointHook":
            checkpoints.type = "AtomicCheckpointHook"
    text = cfg.pretty_text
    known = file.is_file() and file.read_text() == text
    if not known and any(file.parent.glob("seed_*/last_checkpoint")):
        raise InputError(f"{file.parent} has runs of another config: delete it, or change --out")
    write_atomically(file, text.encode())


def prepare(args) -> tuple[dict[str, dict], dict[str, str]]:
    """Write the configs; return parameters and multiply-adds by name, and what is wrong."""
    from mrla_mm.analysis.complexity import measure  # imports mmdet: --help should not wait for it

    costs, faults = {}, {}
    for config in args.configs:
        name = Path(config).stem
        if name in costs or name in faults:
            raise InputError(f"two configs are named {name}: their results need two names")
        first = None if args.independent else next(iter(costs), name)
        try:
            cfg = read_config(config, args.cfg_options)
            model = build_model(cfg)
        except InputError:
            raise
        except Exception as error:  # whatever a config does
            faults[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{name} fails: {faults[name]}")
            continue
        write_config(cfg, args.out / name / f"{name}.py", first)
        costs[name] = dict(parameters=sum(p.numel() for p in model.parameters()))
        args.shape = args.shape or ((800, 1280) if cfg.default_scope == "mmdet" else (224, 224))
        try:
            costs[name]["multiply_adds"] = measure(model, tuple(args.shape)).total
        except Exception as error:  # of a model that has no plain forward pass
            print(f"{name}: multiply-adds are not counted: {type(error).__name__}: {error}")
    return costs, faults


def gpus() -> list[str]:
    """Return the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def find_slots(jobs: int | None) -> list[dict[str, str]]:
    """Return the environment of each run that there is room for at a time."""
    if found := gpus():
        if jobs and jobs > len(found):
            raise InputError(f"--jobs {jobs}: there are {len(found)} GPUs, for one run each")
        return [dict(CUDA_VISIBLE_DEVICES=gpu) for gpu in found[:jobs]]
    threads = max(1, (os.cpu_count() or 1) // (jobs or 1))
    return [dict(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(threads)))] * (jobs or 1)


class Worker:
    """The process of a run, in a slot."""

    context = multiprocessing.get_context("spawn")

    def __init__(self, run, first, slot):
        self.run = run
        self.slot = slot
        self.progress = self.context.Array("d", 2)  # share that is trained: at the start, and now
        run.folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(slot)
        self.process = self.context.Process(target=work, args=(run, first, self.progress))
        self.process.start()

    def fault(self):
        """Return why the process has failed, None if it has not."""
        code = self.process.exitcode
        if not code:
            return None
        file = self.run.folder / "run.log"
        lines = file.read_text(errors="replace").split("\n") if file.is_file() else []
        last = [line for line in lines if line.strip()][-1:]
        reason = [f"ended by {signal.Signals(-code).name}"] if code < 0 else last
        return f"{' '.join(reason)} ({file})"


def run_all(todo: list[Run], first: Path | None, args, update) -> dict[Run, str]:
    """Run what is to do, so many at a time as there are slots; return what has failed, and why."""
    slots, workers, done, faults = find_slots(args.jobs), [], [], {}
    start = time.monotonic()
    try:
        while todo or workers:
            while todo and slots:
                workers.append(Worker(todo.pop(0), first, slots.pop()))
            passed = time.monotonic() - start
            print_remaining(len(todo), workers, done, passed)
            sentinels = [worker.process.sentinel for worker in workers]
            connection.wait(sentinels, timeout=min(600, max(20, passed)))
            for worker in [each for each in workers if not each.process.is_alive()]:
                workers.remove(worker)
                done.append(worker)
                slots.append(worker.slot)
                if reason := worker.fault():
                    faults[worker.run] = reason
                    print(f"{worker.run} fails: {reason}")
                update(faults)
    finally:
        for worker in workers:
            worker.process.kill()  # the next call goes on from the last checkpoint
            worker.process.join()
    return faults


def print_remaining(waiting: int, workers: list[Worker], done: list[Worker], passed: float) -> None:
    """Say what remains and, once a run has got ahead, how long it will take."""
    gained = sum(worker.progress[1] - worker.progress[0] for worker in [*workers, *done])
    left = waiting + sum(1 - worker.progress[1] for worker in workers)
    line = f"{len(workers)} running, {waiting} waiting"
    if gained > 0:
        line += f", about {timedelta(seconds=round(left * passed / gained))} left"
    print(line, flush=True)


def show(values: list[float]) -> str:
    """Return mean and standard error, to two digits of the error."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.4g}"
    error = statistics.stdev(values) / len(values) ** 0.5
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 4
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def make_table(rows: list[dict], costs: dict[str, dict], metric: str, args) -> list[dict]:
    """Return a row a config: its metric, the difference to the first by seed, and its costs."""
    values = {(row["config"], row["seed"]): row[metric] for row in rows if metric in row}
    first, *_ = names = [Path(config).stem for config in args.configs]
    table = []
    for name in names:
        own = {seed: values[config, seed] for config, seed in values if config == name}
        pairs = [own[seed] - values[first, seed] for seed in own if (first, seed) in values]
        line = {"config": name, "runs": f"{len(own)} of {args.seeds}"}
        line[metric] = show([*own.values()]) if own else ""
        line[f"difference to {first}"] = show(pairs) if pairs and name != first else ""
        cost = costs.get(name, {})
        line["parameters"] = f"{cost['parameters']:,}" if cost else ""
        height, width = args.shape or (0, 0)
        operations = f"{cost['multiply_adds'] / 1e9:.2f}" if "multiply_adds" in cost else ""
        line[f"G multiply-adds at {width} x {height}"] = operations
        for title, key in {"s/iteration": "iteration_seconds", "MB": "peak_megabytes"}.items():
            measured = [row[key] for row in rows if row["config"] == name]
            line[title] = f"{statistics.median(measured):.3g}" if measured else ""
        table.append(line)
    return table


def draw(rows: list[dict], metric: str) -> Figure:
    """Plot every run as a dot, the runs of a seed joined, and the mean of a config as a bar."""
    names = [*dict.fromkeys(row["config"] for row in rows)]
    figure = Figure(figsize=(2 + 1.5 * len(names), 3.6), layout="constrained")
    axes = figure.subplots()
    for seed in dict.fromkeys(row["seed"] for row in rows):
        own = {row["config"]: row[metric] for row in rows if row["seed"] == seed}
        reached = [own.get(name, math.nan) for name in names]
        axes.plot(range(len(names)), reached, "o-", color="tab:blue", lw=0.4, ms=4)
    for index, name in enumerate(names):
        mean = statistics.mean(row[metric] for row in rows if row["config"] == name)
        axes.plot(index, mean, "_", color="tab:red", ms=24, mew=2)
    axes.set_xticks(range(len(names)), names, rotation=15)
    axes.set_ylabel(metric)
    return figure


def write_results(runs: list[Run], costs: dict[str, dict], faults: dict, args) -> str:
    """Write runs.csv, table.md and the plots of what there is; return the table."""
    rows = []
    for run in runs:
        if result := run.result():
            metrics = result.pop("metrics")
            rows.append(dict(config=run.name, seed=run.seed, **metrics, **result))
            args.metric = args.metric or next(iter(metrics))
            if args.metric not in metrics:
                raise InputError(f"--metric {args.metric}: {run} reports {', '.join(metrics)}")
    lines = [f"- {run} fails: {reason}" for run, reason in faults.items()]
    if rows:
        table = make_table(rows, costs, args.metric, args)
        cells = [list(table[0]), ["---"] * len(table[0]), *(list(line.values()) for line in table)]
        lines = [*(f"| {' | '.join(line)} |" for line in cells), "", *lines]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with (args.out / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):
            figure = draw(rows, args.metric)
            figure.savefig(args.out / "runs.svg", metadata=dict(Date=None))
            figure.savefig(args.out / "runs.png", dpi=150)
    text = "\n".join(lines).strip() + "\n"
    (args.out / "table.md").write_text(text)
    return text


def stop(*_):
    """End at a SIGTERM."""
    raise SystemExit(TERMINATED)


def main(argv=None):
    """Run what is missing; write and print what was found."""
    args = parse_args(argv)
    MMLogger.get_current_instance().setLevel("WARNING")
    costs, broken = prepare(args)
    runs = []
    for seed in range(args.seeds):
        for name in costs:
            folder = args.out / name
            runs.append(Run(name, seed, folder / f"{name}.py", folder / f"seed_{seed}"))
    todo = [run for run in runs if run.result() is None]
    begun = sum((run.folder / "last_checkpoint").is_file() for run in todo)
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished, {begun} are broken off")
    first = next(iter(costs), None)
    shared = None if args.independent else args.out / first / f"{first}.py"
    signal.signal(signal.SIGTERM, stop)
    try:
        faults = run_all(
            todo,
            shared,
            args,
            lambda faults: write_results(runs, costs, {**broken, **faults}, args),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from {args.out}") from None
    faults = broken | faults
    print(write_results(runs, costs, faults, args))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
