#!/usr/bin/env python
"""Train and test configs from several seeds each, and compare what they reach.

The same command goes on where it was ended, skips what is finished and retries what failed. Runs
of a seed see the same images, and start from the same weights where the first config has them too.
"""

import argparse
import csv
import hashlib
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
from itertools import product
from multiprocessing.connection import wait
from numbers import Number
from pathlib import Path

import torch
from mmengine.hooks import Hook
from mmengine.runner import set_random_seed

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.engine.checkpointing import write_atomically
from mrla_mm.engine.stopping import TERMINATED
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

COSTS = ("parameters", "seconds an iteration", "peak memory, MiB", "multiply-adds, G")


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("configs", nargs="+", help="files, or package::name; the first is the base")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each config (default: 5)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 1, or one on each GPU)")
    parser.add_argument("--metric", help="e.g. coco/bbox_mAP (default: the first of the test)")
    parser.add_argument("--out", type=Path, default="work_dirs/compare", help="for all results")
    parser.add_argument("--independent", action="store_true", help="share no initial weights")
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def initial_weights(cfg, seed):
    """Return the weights that a model starts with, and the keys of those that the seed decides."""
    states = []
    for number in (seed, seed + 1):
        set_random_seed(number)
        model = build_model(cfg)
        model.init_weights()
        states.append(model.state_dict())
    state, other = states
    return state, {key for key in state if not torch.equal(state[key], other[key])}


class ComparedRunHook(Hook):
    """Shared initial weights, random numbers that a resumed run repeats, progress and costs."""

    priority = "VERY_HIGH"

    def __init__(self, progress):
        self.progress = progress

    def before_run(self, runner):
        """Let a new run draw the weights of the first config; `load_from` comes later and wins."""
        compare = runner.cfg.get("compare")
        if compare is None or runner.cfg.resume:
            return
        first = read_config(compare.weights_shared_with, {})
        weights, drawn = initial_weights(runner.cfg, runner.seed)
        shared, drawn_by_first = initial_weights(first, runner.seed)
        for key in drawn & drawn_by_first:  # not what is constant or pretrained in either
            if weights[key].shape == shared[key].shape:
                weights[key] = shared[key]
        model = runner.model
        model.init_weights = lambda: model.load_state_dict(weights)

    def before_train(self, runner):
        """Let the loader's workers take their seeds from the main process, anew each epoch."""
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
        """Note what the run has cost; the memory is the GPU's if there is one."""
        parameters = sum(p.numel() for p in runner.model.parameters())
        seconds, _ = runner.message_hub.get_scalar("train/time").data
        unit = 2**20 if sys.platform == "darwin" else 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**20
        numbers = parameters, float(statistics.median(seconds)), peak, math.nan
        costs = json.dumps(dict(zip(COSTS, numbers, strict=True)))
        write_atomically(Path(runner.work_dir) / "trained.json", costs.encode())


def train_and_test(folder, progress):
    """Train and test with the tools; write the result."""
    paths = [Path(__file__).with_name(f"{tool}.py") for tool in ("train", "test", "get_flops")]
    train, test, flops = (runpy.run_path(str(path)) for path in paths)
    name, seed = folder.parent.name, folder.name.removeprefix("seed_")
    config, options = str(folder.with_name(f"{name}.py")), [f"randomness.seed={seed}"]
    if not (folder / "trained.json").is_file():
        argv = [config, "--work-dir", str(folder), "--resume", "--cfg-options", *options]
        train["main"](argv, [ComparedRunHook(progress)])
    argv = [config, str(train["newest_checkpoint"](folder)), "--work-dir", str(folder / "test")]
    options.append("visualizer=None")  # mmengine would take the training's, which is closed
    found = test["main"]([*argv, "--cfg-options", *options])
    metrics = {key: float(value) for key, value in found.items() if isinstance(value, Number)}
    if not metrics:
        raise InputError("the test returns no metric; mmdet does so if nothing is detected")
    costs = json.loads((folder / "trained.json").read_text())
    try:
        options = argparse.Namespace(shape=None, cfg_options={}, device="meta")
        costs[COSTS[-1]] = flops["count"](config, options).total / 1e9
    except Exception as error:  # of a model that needs more than images
        print(f"multiply-adds are not counted: {type(error).__name__}: {error}")
    result = dict(config=name, seed=int(seed)) | metrics | costs
    write_atomically(folder / "result.json", json.dumps(result, indent=1).encode())


def work(folder, progress):
    """Do a run in this process: in a group of its own, with the output in run.log."""

    def end_with_parent():
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)  # the loaders' workers too

    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    with (folder / "run.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(cli.run(lambda _: train_and_test(folder, progress)))


def write_config(name, args, files):
    """Write the config that runs read, after those of other configs; return its path."""
    cfg = read_config(name, args.cfg_options)
    file = args.out / Path(name).stem / f"{Path(name).stem}.py"
    if file in files:
        raise InputError(f"there are two configs of this name, and results in {file.parent}")
    first = [*files, file][0]
    own = {"randomness.seed": 0}
    if not args.independent:
        own["compare.weights_shared_with"] = str(first)
    if files and not args.independent:
        own["compare.sha256"] = hashlib.sha256(first.read_bytes()).hexdigest()
    own["train_dataloader.persistent_workers"] = False  # a resumed one would draw other numbers
    own["default_hooks.checkpoint.type"] = "AtomicCheckpointHook"
    own["default_hooks.checkpoint.max_keep_ckpts"] = 1
    cfg.merge_from_dict(own)
    text = cfg.pretty_text
    if any(file.parent.glob("seed_*/last_checkpoint")) and file.read_text() != text:
        raise InputError(f"{file.parent} has runs of another config: delete it, or change --out")
    write_atomically(file, text.encode())
    return file


def find_slots(jobs):
    """Return the environment variables of as many runs as there is room for at a time."""
    gpus = torch.cuda.device_count()
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[: jobs or gpus]]
    threads = max(1, (os.cpu_count() or 1) // (jobs or 1))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * (jobs or 1)


def run_all(folders, slots, faults, update):
    """Run all, as many at a time as there are slots; after each note a fault and call `update`."""
    waiting, running, begin = list(folders), {}, time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    progress = {folder: spawn.Array("d", 2) for folder in folders}  # by earlier calls, and now
    try:
        while waiting or running:
            while waiting and slots:
                folder, slot = waiting.pop(0), slots.pop()
                write_atomically(folder / "run.log", b"")
                os.environ.update(slot)
                process = spawn.Process(target=work, args=(folder, progress[folder]))
                process.start()
                running[process.sentinel] = folder, process, slot
            passed = time.monotonic() - begin
            gained = sum(now - before for before, now in progress.values())
            left = len(waiting) + sum(1 - progress[folder][1] for folder, *_ in running.values())
            rest = f"about {timedelta(seconds=round(left * passed / gained))}" if gained else "?"
            print(f"{len(running)} running, {len(waiting)} waiting, time left: {rest}", flush=True)
            for sentinel in wait(running, timeout=min(600, max(20, passed))):
                folder, process, slot = running.pop(sentinel)
                process.join()
                slots.append(slot)
                end = "is finished"
                if code := process.exitcode:
                    last = (folder / "run.log").read_text(errors="replace").strip().split("\n")[-1]
                    end = f"fails: {signal.Signals(-code).name if code < 0 else last}"
                    faults[folder] = f"{folder} {end}"
                print(f"{folder} {end}", flush=True)
                update()
    finally:
        for _, process, _ in running.values():
            process.kill()  # the next call goes on from the last checkpoint
            process.join()


def describe(values):
    """Return mean and standard error as text, empty for no values."""
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    digits = max(0, 1 - math.floor(math.log10(error or 0.001)))  # two of the error
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def make_table(values, rows, metric):
    """Return a row a config: metric, difference to the first paired by seed, and median costs."""
    first, *_ = values
    table = [["config", "runs", metric, f"over {first}", *COSTS], ["---"] * (4 + len(COSTS))]
    for name, own in values.items():
        shared = [seed for seed in own if seed in values[first] and name != first]
        gains = [own[seed] - values[first][seed] for seed in shared]
        line = [name, str(len(own)), describe([*own.values()]), describe(gains)]
        for cost in COSTS:
            found = [row[cost] for row in rows if row["config"] == name]
            value = statistics.median(found or [math.nan])
            line.append(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
        table.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in table).replace(" nan ", " ")


def draw(values, metric):
    """Plot every run as a dot, the runs of a seed joined, and the mean of a config as a bar."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(2 + 1.2 * len(values), 3.6), layout="constrained").subplots()
    for seed in set().union(*values.values()):
        points = [own.get(seed, math.nan) for own in values.values()]
        axes.plot([*values], points, "o-", color="tab:blue", lw=0.4, ms=4)
    means = [statistics.mean(own.values()) if own else math.nan for own in values.values()]
    axes.plot([*values], means, "_", color="tab:red", ms=24, mew=2)
    axes.tick_params("x", rotation=15)
    axes.set_ylabel(metric)
    return axes.figure


def write_results(args, folders, faults):
    """Write runs.csv, table.md and the plots of what is finished; return the table."""
    files = [folder / "result.json" for folder in folders]
    rows = [json.loads(file.read_text()) for file in files if file.is_file()]
    text = ""
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        metric = args.metric or columns[2]
        values = {Path(config).stem: {} for config in args.configs}
        for row in rows:
            name, seed = row["config"], row["seed"]
            if metric in row:
                values[name][seed] = row[metric]
            else:
                run = f"{name} from seed {seed}"
                faults[run] = f"the test of {run} returns no {metric}, but {', '.join(row)}"
        text = make_table(values, rows, metric)
        with (args.out / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        for suffix in ("svg", "png"):
            draw(values, metric).savefig(args.out / f"runs.{suffix}", dpi=150)
    text += "".join(f"\n{fault}\n" for fault in faults.values())
    write_atomically(args.out / "table.md", text.encode())
    return text


def main(argv=None):
    """Run what is missing; write and print what was found."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    files = []
    faults = {}  # by run, or by config
    for config in args.configs:
        try:
            files.append(write_config(config, args, files))
        except Exception as error:  # whatever a config does
            faults[config] = f"{config} fails: {type(error).__name__}: {error}"
            print(faults[config])
    folders = [file.with_name(f"seed_{n}") for n, file in product(range(args.seeds), files)]
    todo = [folder for folder in folders if not (folder / "result.json").is_file()]
    begun = sum((folder / "last_checkpoint").is_file() for folder in todo)
    print(f"{len(folders)} runs: {len(folders) - len(todo)} finished, {begun} broken off")
    run_all(todo, find_slots(args.jobs), faults, lambda: write_results(args, folders, faults))
    print(write_results(args, folders, faults), end="")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
