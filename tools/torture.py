#!/usr/bin/env python
"""End a short training at random moments and show that it always continues to the same weights.

`python tools/torture.py` trains a small Mask R-CNN once without interruption. Then, each time from scratch, it ends
one at a random moment of a chosen phase with kill -9 (50 times) or SIGTERM (8), or by a full disk (6), looks at what
was left behind, continues with `--resume` and compares model, optimizer and schedule with the first run's, bit for
bit. The figures go to OUT/torture.json. It uses the CPU alone: that is where equal means bitwise equal.
"""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from datetime import date
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import mmengine.config.config
import torch

import mrla_mm
from mrla_mm import cli
from mrla_mm.datasets import generate_shapes
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE, TRAINING, SAVING, EVALUATING = range(4)
PHASES = ("starting or between", "training step", "checkpoint being written", "evaluation")
AIMS = (SAVING, TRAINING, EVALUATING, ELSEWHERE)
EPOCHS, IMAGES, BATCH = 2, 6, 2
TIMEOUT = 180  # seconds for a run of a few
CONFIG = """_base_ = {base!r}
model = dict(
    roi_head=dict(bbox_head=dict(fc_out_channels=64)),
    train_cfg=dict(rpn_proposal=dict(max_per_img=20), rcnn=dict(sampler=dict(num=8))),
    test_cfg=dict(rpn=dict(max_per_img=20), rcnn=dict(max_per_img=5)),
)
workers = dict(num_workers={workers}, persistent_workers={workers} > 0)
train_dataloader = dict(batch_size={batch}, **workers)
val_dataloader = dict(batch_size={batch}, **workers)
train_cfg = dict(max_epochs={epochs})
default_hooks = dict(
    logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=1, save_best="coco/bbox_mAP", rule="greater")
)
custom_hooks = [
    dict(type="DatasetCheckHook"),
    dict(type="CheckpointCheckHook"),
    dict(type="PhaseHook", priority="VERY_HIGH"),
    dict(type="PhaseEndHook", priority="LOWEST"),
]
randomness = dict(seed=1)
"""


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="torture.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="runs ended by kill -9")
    parser.add_argument("--terms", type=int, default=8, help="runs ended by SIGTERM")
    parser.add_argument("--full", type=int, default=6, help="runs ended by a full disk")
    parser.add_argument("--workers", type=int, default=1, help="data loading workers")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/torture"))
    args = parser.parse_args(argv)
    if min(args.kills, args.terms, args.full, args.workers) < 0:
        parser.error("no number may be negative")
    return args


class Training:
    """Trainings in processes of their own, forked from this one so that they need not import anything."""

    def __init__(self, config, data, out):
        self.config, self.out = config, out
        self.options = [f"data_root={data}"]
        for phase, step in (("train", 2), ("val", 1), ("test", 1)):
            self.options.append(f"{phase}_dataloader.dataset.pipeline.{step}.scale=(96,64)")
        self.context = multiprocessing.get_context("fork")
        self.visits = self.context.Array("i", len(PHASES), lock=False)
        self.now = self.context.Value("i", ELSEWHERE, lock=False)

    def start(self, work_dir, *more, room=None):
        """Start one; `visits` counts how often it enters each phase, `now` is the phase it is in."""
        self.visits[:] = [0] * len(PHASES)
        self.now.value = ELSEWHERE
        process = self.context.Process(target=self.run, args=(work_dir, *more), kwargs=dict(room=room))
        process.start()
        return process

    def enter(self, phase):
        """Note the phase."""
        self.now.value = phase
        self.visits[phase] += 1

    def run(self, work_dir, *more, room):
        """Run tools/train.py in this process; `room` is the largest file that it can write, in bytes."""
        self.register_hooks()
        log = open(self.out / "console.log", "a")  # noqa: SIM115  open until the process ends
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        code = 1
        try:
            argv = [str(self.config), "--work-dir", str(work_dir), *more, "--cfg-options", *self.options]
            self.enter(ELSEWHERE)
            code = cli.run(load_train().main, argv)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def register_hooks(self):
        """Register the hooks that say what the run is doing, in front of the checkpoint hook and behind it."""
        from mmengine.hooks import Hook
        from mmengine.registry import HOOKS

        training = self

        @HOOKS.register_module()
        class PhaseHook(Hook):
            """Says what begins."""

            def before_train_iter(self, *_, **__):
                training.enter(TRAINING)

            def before_save_checkpoint(self, *_, **__):
                training.enter(SAVING)

            def before_val_iter(self, *_, **__):
                training.enter(EVALUATING)

        @HOOKS.register_module()
        class PhaseEndHook(Hook):
            """Says what has ended."""

            def over(self, *_, **__):
                training.now.value = ELSEWHERE

            after_train_iter = after_train_epoch = after_val_epoch = over


def load_train():
    """Return tools/train.py as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    import train

    return train


def content_of(checkpoint):
    """Return all of a checkpoint that decides how training goes on."""
    content = torch.load(checkpoint, weights_only=True)
    meta = {key: content["meta"][key] for key in ("epoch", "iter", "replay")}
    return dict(meta=meta, **{key: content[key] for key in ("state_dict", "optimizer", "param_schedulers")})


def equal(one, other):
    """Whether two nested values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return one == other


def end_of(process):
    """Wait for a training and its data loading workers, which hold the sentinel's other end; return the exit code.

    None says that one of them would not end.
    """
    ended = multiprocessing.connection.wait([process.sentinel], TIMEOUT)
    if not ended:
        process.kill()
    process.join()
    return process.exitcode if ended else None


def interrupt(training, work_dir, sent, phase, reference, rng):
    """Start a training and end it in the phase; return its exit code, and the phase that it was really in."""
    visit = rng.randint(1, reference["visits"][phase])
    delay = rng.uniform(0, reference["seconds"][phase])
    process = training.start(work_dir)
    while process.is_alive() and training.visits[phase] < visit:
        time.sleep(0.0005)
    process.join(delay)
    found = training.now.value
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, sent)
    code = end_of(process)
    if sent == signal.SIGKILL:
        found = training.now.value  # it may have gone on until the signal came
    return code, PHASES[found]


def observe(training, work_dir):
    """Run the uninterrupted training; return how often it enters each phase, and how long each takes."""
    process = training.start(work_dir)
    seconds, last, began = [0.0] * len(PHASES), ELSEWHERE, time.monotonic()
    while process.is_alive():
        now = training.now.value
        process.join(0.0005)
        moment = time.monotonic()
        if last == now and (now != ELSEWHERE or not training.visits[TRAINING]):
            seconds[now] += moment - began
        last, began = now, moment
    if process.exitcode:
        raise InputError(f"the uninterrupted training failed; see {training.out / 'console.log'}")
    visits = list(training.visits)
    return visits, [total / max(count, 1) for total, count in zip(seconds, visits, strict=True)]


def survey(work_dir):
    """Return the complete and the torn checkpoints that a killed run left, and whether its record can be followed."""
    complete, torn = [], []
    for path in sorted(work_dir.glob("*.pth")):
        try:
            torch.load(path, weights_only=True)
        except Exception:
            torn.append(path.name)
        else:
            complete.append(path.name)
    record = work_dir / "last_checkpoint"
    followed = not record.exists() or Path(record.read_text()).is_file()
    return complete, torn, followed


@contextlib.contextmanager
def small_disk(folder, room):
    """Mount a file system of so many bytes, where the system lets us; yields a function that makes room again."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(mount, capture_output=True, check=False).returncode

    def make_room():
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)

    try:
        yield make_room if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def signal_trial(training, number, sent, reference, rng, work_dir):
    """End a training with a signal and resume it; return what was seen."""
    early = 0
    while True:
        shutil.rmtree(work_dir, ignore_errors=True)
        code, phase = interrupt(training, work_dir, sent, AIMS[number % len(AIMS)], reference, rng)
        if code != 0:
            break
        early += 1  # it had finished before the signal came: no trial
    wanted = (-sent,) if sent == signal.SIGKILL else (-sent, 128 + sent)
    row = dict(ended_by=signal.Signals(sent).name, phase=phase, exit=code, expected=code in wanted, early=early)
    return row | outcome(training, reference, work_dir)


def full_trial(training, reference, rng, work_dir):
    """Let a training run on a disk too small for it, make room, and resume it; return what was seen."""
    shutil.rmtree(work_dir, ignore_errors=True)
    size = reference["bytes"]
    with small_disk(work_dir, int(size * rng.uniform(0.2, 1.9))) as make_room:  # a second one never fits
        room = None if make_room else int(size * rng.uniform(0.1, 0.9))
        process = training.start(work_dir, room=room)
        code = end_of(process)
        parts = [path.name for path in work_dir.glob("*.part")]
        row = dict(ended_by="full disk", phase="tmpfs" if make_room else "RLIMIT_FSIZE", exit=code, early=0)
        if make_room:
            make_room()
        return row | dict(expected=code in (1, 2) and not parts) | outcome(training, reference, work_dir)


def outcome(training, reference, work_dir):
    """Look at what an ended run left, resume it, and compare its end with that of the uninterrupted one."""
    complete, torn, followed = survey(work_dir) if work_dir.exists() else ([], [], True)
    parts = [path.name for path in work_dir.glob("*.part")]
    resumed = training.start(work_dir, "--resume", "auto")
    code = end_of(resumed)
    final = work_dir / reference["name"]
    same = code == 0 and final.is_file() and equal(content_of(final), reference["content"])
    left = sorted(path.name for path in work_dir.glob("*.pth*") if not path.name.startswith("best_"))
    intact = not torn and followed and left == [reference["name"]]
    return dict(complete=complete, torn=torn, parts=parts, followed=followed, left=left, same=same, intact=intact)


def main(argv=None):
    """Torture; exit with 1 unless every run survived."""
    args = parse_args(argv)
    began, rng, out = time.monotonic(), random.Random(args.seed), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    data, config, work_dir = out / "data", out / "config.py", out / "trial"
    generate_shapes(data, num_train=IMAGES, num_val=BATCH, seed=0)
    base = str(ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py")
    config.write_text(CONFIG.format(base=base, workers=args.workers, epochs=EPOCHS, batch=BATCH))
    load_train()
    from mmdet.utils import register_all_modules

    register_all_modules()  # here, once, instead of in every training
    # Each checkpoint carries the config as text; laying it out nicely would take most of these short runs.
    mmengine.config.config.FormatCode = lambda text, **_: (text, True)
    training = Training(config, data, out)
    shutil.rmtree(out / "reference", ignore_errors=True)
    visits, seconds = observe(training, out / "reference")
    final = out / "reference" / f"epoch_{EPOCHS}.pth"
    reference = dict(name=final.name, content=content_of(final), bytes=final.stat().st_size)
    reference |= dict(visits=visits, seconds=seconds)
    for phase, count, duration in zip(PHASES, visits, seconds, strict=True):
        print(f"uninterrupted: {count:3} x {phase}, {duration:.3f} s each")
    trials = []
    for sent, count in ((signal.SIGKILL, args.kills), (signal.SIGTERM, args.terms), (None, args.full)):
        for number in range(count):
            if sent is None:
                row = full_trial(training, reference, rng, work_dir)
            else:
                row = signal_trial(training, number, sent, reference, rng, work_dir)
            trials.append(row | dict(survived=row["expected"] and row["same"] and row["intact"]))
            print(f"{len(trials):3} {trials[-1]}", flush=True)
    report(trials, time.monotonic() - began, args, out)
    if not all(row["survived"] for row in trials):
        sys.exit(1)


def report(trials, seconds, args, out):
    """Print and write the figures."""
    table = {}
    for row in trials:
        cell = table.setdefault(f"{row['ended_by']}, {row['phase']}", [0, 0])
        cell[0] += row["survived"]
        cell[1] += 1
    figures = dict(
        survived={name: f"{good} of {total}" for name, (good, total) in sorted(table.items())},
        all=f"{sum(row['survived'] for row in trials)} of {len(trials)}",
        torn_checkpoints=sum(len(row["torn"]) for row in trials),
        parts_left_by_signals=sum(len(row["parts"]) for row in trials),
        minutes=round(seconds / 60, 1),
        date=str(date.today()),
        settings={key: str(value) for key, value in vars(args).items() if key != "out"},
        versions=dict(python=platform.python_version(), torch=torch.__version__, mrla_mm=mrla_mm.__version__),
    )
    (out / "torture.json").write_text(json.dumps(dict(figures=figures, trials=trials), indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.exit(cli.run(main))
