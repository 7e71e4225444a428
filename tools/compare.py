#!/usr/bin/env python
"""Train and test configs from several seeds each, and compare what they reach.

  compare.py plain.py light.py eca.py --seeds 5 --jobs 2

Writes runs.csv, table.md and a plot to --out. The same command goes on where it was ended, skips
what is finished and retries what failed. Runs of a seed see the same images, and start from the
same weights as far as the first config's model has them too.
"""

import argparse
import contextlib
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
from multiprocessing.connection import wait
from numbers import Number
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
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
SPAWN = multiprocessing.get_context("spawn")
COSTS = ("parameters", "multiply-adds, G", "seconds an iteration", "peak memory, MiB")


def parse_args(argv):
    """Parse the command line."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare.py", description=__doc__, formatter_class=kind)
    names = "config file, or package::name of a packed one; the first is what others differ from"
    parser.add_argument("configs", nargs="+", metavar="config", help=names)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each config (default: 5)")
    jobs = "runs at a time: on GPUs at most one each (default: all), on a CPU they share its cores"
    parser.add_argument("--jobs", type=int, help=jobs)
    parser.add_argument("--metric", help="e.g. coco/bbox_mAP (default: the first of the test)")
    out = dict(type=Path, default=Path("work_dirs/compare"))
    parser.add_argument("--out", **out, help="folder for all results (default: %(default)s)")
    own = "draw the initial weights of each config on their own"
    parser.add_argument("--independent", action="store_true", help=own)
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def initial_weights(cfg, seed):
    """Return the weights that a config's model starts with, those of its init_cfg included."""
    set_random_seed(seed)
    model = build_model(cfg)
    model.init_weights()
    return model.state_dict()


def shared_weights(cfg, first, seed):
    """Return a model's initial weights, with the first model's where both draw them at random.

    What no seed changes, constants and pretrained weights, is as the config says.
    """
    own, drawn = initial_weights(cfg, seed), initial_weights(first, seed)
    own_again, drawn_again = initial_weights(cfg, seed + 1), initial_weights(first, seed + 1)
    for key in own.keys() & drawn.keys():
        fixed = torch.equal(own[key], own_again[key]) or torch.equal(drawn[key], drawn_again[key])
        if not fixed and own[key].shape == drawn[key].shape:
            own[key] = drawn[key]
    return own


class ComparedRunHook(Hook):
    """Shared initial weights, random numbers that a resumed run repeats, progress and costs."""

    priority = "VERY_HIGH"

    def __init__(self, first, progress):
        self.first = first
        self.progress = progress
        self.costs = ()

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
        """Let the loader's workers take their seeds from the main process, anew each epoch."""
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
        """Note the median time of an iteration, and peak memory on the GPU if there is one."""
        seconds, _ = runner.message_hub.get_scalar("train/time").data
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        self.costs = float(statistics.median(seconds)), peak / 2**20


def count(cfg):
    """Return parameters and multiply-adds of a config's model, for an image of the usual size."""
    from mrla_mm.analysis.complexity import measure  # imports mmdet: --help should not wait for it

    model = build_model(cfg)
    shape = (800, 1280) if cfg.default_scope == "mmdet" else (224, 224)
    try:
        total = measure(model, shape).total / 1e9
    except Exception as error:  # of a model that needs more than images
        print(f"multiply-adds are not counted: {type(error).__name__}: {error}")
        total = math.nan
    return sum(p.numel() for p in model.parameters()), total


class Run(NamedTuple):
    """A run of a config from a seed."""

    name: str
    seed: int
    config: str
    folder: Path
    first: Path | None  # config whose initial weights it shares
    progress: object  # share of the training: done by earlier calls, and done now

    def __str__(self):
        return f"{self.name}, seed {self.seed}"

    def result(self):
        """Return what the run has reached and cost, None if it is not finished."""
        file = self.folder / "result.json"
        return json.loads(file.read_text()) if file.is_file() else None


def train_and_test(run):
    """Train and test with the tools; write the result."""
    train, test = (runpy.run_path(str(TOOLS / f"{name}.py")) for name in ("train", "test"))
    options = ["--cfg-options", f"randomness.seed={run.seed}"]
    trained = run.folder / "trained.json"
    if not trained.is_file():
        hook = ComparedRunHook(run.first, run.progress)
        train["main"]([run.config, "--work-dir", str(run.folder), "--resume", *options], [hook])
        costs = [*count(read_config(run.config, {})), *hook.costs]
        write_atomically(trained, json.dumps(dict(zip(COSTS, costs, strict=True))).encode())
    checkpoint = train["newest_checkpoint"](run.folder)
    if checkpoint is None:
        raise InputError(f"the training has left no checkpoint in {run.folder}")
    options += ["visualizer=None"]  # mmengine would take the training's, which is closed
    argv = [run.config, str(checkpoint), "--work-dir", str(run.folder / "test"), *options]
    found = test["main"](argv)
    result = {key: float(value) for key, value in found.items() if isinstance(value, Number)}
    if not result:
        raise InputError("the test returns no metric; mmdet does so if nothing is detected")
    result |= json.loads(trained.read_text())
    write_atomically(run.folder / "result.json", json.dumps(result, indent=1).encode())


def work(run):
    """Do the work of a run's process, which is in a group of its own and writes to run.log."""

    def end_with_parent():
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)  # the loaders' workers too

    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    with (run.folder / "run.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(cli.run(lambda _: train_and_test(run)))


def prepare(name, args, first):
    """Write the config that the runs read; raise InputError if there are runs of another one."""
    cfg = read_config(name, args.cfg_options)
    own = {"compare.weights_shared_with": str(first), "randomness.seed": 0}
    own |= {"default_hooks.checkpoint.type": "AtomicCheckpointHook"}
    own |= {"default_hooks.checkpoint.max_keep_ckpts": 1}
    own |= {"train_dataloader.persistent_workers": False}  # a resumed one would draw other numbers
    cfg.merge_from_dict(own)
    file = args.out / Path(name).stem / Path(name).name
    same = file.is_file() and file.read_text() == cfg.pretty_text
    if not same and any(file.parent.glob("seed_*/last_checkpoint")):
        raise InputError(f"{file.parent} has runs of another config: delete it, or change --out")
    write_atomically(file, cfg.pretty_text.encode())
    return file


def find_slots(jobs):
    """Return the environment variables of as many runs as there is room for at a time."""
    gpus = torch.cuda.device_count()
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[: jobs or gpus]]
    threads = max(1, (os.cpu_count() or 1) // (jobs or 1))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * (jobs or 1)


def run_all(todo, slots):
    """Run all, as many at a time as there are slots; yield each that has ended and its code."""
    waiting, running, begin = list(todo), {}, time.monotonic()
    try:
        while waiting or running:
            while waiting and slots:
                run, slot = waiting.pop(0), slots.pop()
                run.folder.mkdir(parents=True, exist_ok=True)
                os.environ.update(slot)
                process = SPAWN.Process(target=work, args=(run,))
                process.start()
                running[process.sentinel] = run, process, slot
            passed = time.monotonic() - begin
            gained = sum(run.progress[1] - run.progress[0] for run in todo)
            left = len(waiting) + sum(1 - run.progress[1] for run, *_ in running.values())
            rest = f"about {timedelta(seconds=round(left * passed / gained))}" if gained else "?"
            print(f"{len(running)} running, {len(waiting)} waiting, time left: {rest}", flush=True)
            for sentinel in wait(running, timeout=min(600, max(20, passed))):
                run, process, slot = running.pop(sentinel)
                process.join()
                slots.append(slot)
                yield run, process.exitcode
    finally:
        for _, process, _ in running.values():
            process.kill()  # the next call goes on from the last checkpoint
            process.join()


def mean_and_error(values):
    """Return mean and standard error as text, to two digits of the error; empty for no values."""
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 4
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def make_table(rows, names, metric):
    """Return a row a config: metric, difference to the first paired by seed, and median costs."""
    base = {row["seed"]: row[metric] for row in rows if row["config"] == names[0]}
    table = [["config", "runs", metric, f"over {names[0]}", *COSTS]]
    table.append(["---"] * len(table[0]))
    for name in names:
        own = [row for row in rows if row["config"] == name]
        gains = [row[metric] - base[row["seed"]] for row in own if row["seed"] in base]
        line = [name, f"{len(own)}", mean_and_error([row[metric] for row in own])]
        line.append(mean_and_error(gains) if name != names[0] else "")
        for cost in COSTS:
            value = statistics.median(row[cost] for row in own) if own else math.nan
            line.append(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
        table.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in table).replace(" nan ", " ")


def draw(rows, names, metric):
    """Plot every run as a dot, the runs of a seed joined, and the mean of a config as a bar."""
    figure = Figure(figsize=(2 + 1.2 * len(names), 3.6), layout="constrained")
    axes = figure.subplots()
    for seed in {row["seed"] for row in rows}:
        own = {row["config"]: row[metric] for row in rows if row["seed"] == seed}
        points = [own.get(name, math.nan) for name in names]
        axes.plot(names, points, "o-", color="tab:blue", lw=0.4, ms=4)
    for name in {row["config"] for row in rows}:
        mean = statistics.mean(row[metric] for row in rows if row["config"] == name)
        axes.plot(name, mean, "_", color="tab:red", ms=24, mew=2)
    axes.tick_params("x", rotation=15)
    axes.set_ylabel(metric)
    return figure


def write_results(args, names, runs, faults):
    """Write runs.csv, table.md and the plots of what is finished; return the table."""
    finished = [run for run in runs if run.result()]
    rows = [dict(config=run.name, seed=run.seed) | run.result() for run in finished]
    text = "".join(f"\n{run} fails: {fault}\n" for run, fault in faults.items())
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        metric = args.metric or columns[2]
        if not all(metric in row for row in rows):
            raise InputError(f"--metric {metric}: the tests return {', '.join(columns[2:])}")
        text = make_table(rows, names, metric) + text
        with (args.out / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):
            for suffix in ("svg", "png"):
                draw(rows, names, metric).savefig(args.out / f"runs.{suffix}", dpi=150)
    (args.out / "table.md").write_text(text)
    return text


def main(argv=None):
    """Run what is missing; write and print what was found."""
    args = parse_args(argv)
    MMLogger.get_current_instance().setLevel("WARNING")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    names = [Path(config).stem for config in args.configs]
    if len(set(names)) < len(names):
        raise InputError(f"each config needs a name of its own: {', '.join(names)}")
    files, faults, first = [], {}, None
    for config, name in zip(args.configs, names, strict=True):
        try:
            files.append(prepare(config, args, first))
        except InputError:
            raise
        except Exception as error:  # whatever a config does
            faults[name] = f"{type(error).__name__}: {error}"
        first = None if args.independent or not files else files[0]
    runs = []
    for seed in range(args.seeds):
        for file in files:
            place = str(file), file.with_name(f"seed_{seed}"), first
            runs.append(Run(file.stem, seed, *place, SPAWN.Array("d", 2)))
    todo = [run for run in runs if run.result() is None]
    begun = sum((run.folder / "last_checkpoint").is_file() for run in todo)
    print(f"{len(runs)} runs: {len(runs) - len(todo)} finished, {begun} broken off")
    with contextlib.closing(run_all(todo, find_slots(args.jobs))) as ended:
        for run, code in ended:
            print(f"{run} has ended with {code}" if code else f"{run} is finished", flush=True)
            if code:
                lines = (run.folder / "run.log").read_text(errors="replace").strip()
                reason = signal.Signals(-code).name if code < 0 else lines.rpartition("\n")[2]
                faults[run] = f"{reason} ({run.folder}/run.log)"
            write_results(args, names, runs, faults)
    print(write_results(args, names, runs, faults), end="")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
