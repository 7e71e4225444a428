#!/usr/bin/env python
"""Kill a short training at random moments and show that it always continues to the same weights.

`python tools/torture.py --kills 50 --terms 10` trains a small Mask R-CNN once without interruption. Then, each time
from scratch, it ends one with kill -9 (or SIGTERM) at a random moment of a chosen phase, looks at what was left behind,
continues with `--resume` and compares model, optimizer and schedule with the first run's, bit for bit. The figures go
to OUT/torture.json. It uses the CPU alone: that is where equal means bitwise equal.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import date
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

import mrla_mm
from mrla_mm import cli
from mrla_mm.datasets import generate_shapes
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("starting", "training", "saving", "evaluating")
CONFIG = """_base_ = {base!r}
model = dict(train_cfg=dict(rcnn=dict(sampler=dict(num=8))))
workers = dict(num_workers={workers}, persistent_workers={workers} > 0)
train_dataloader = dict(batch_size=2, **workers)
val_dataloader = dict(batch_size=2, **workers)
train_cfg = dict(max_epochs={epochs})
default_hooks = dict(
    logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=1, save_best="coco/bbox_mAP", rule="greater")
)
custom_hooks = [dict(type="DatasetCheckHook"), dict(type="CheckpointCheckHook"), dict(type="PhaseHook")]
randomness = dict(seed=1)
"""


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="torture.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="runs ended by kill -9")
    parser.add_argument("--terms", type=int, default=10, help="runs ended by SIGTERM")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=8, help="training pictures; two make a batch")
    parser.add_argument("--workers", type=int, default=1, help="data loading workers")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/torture"))
    return parser.parse_args(argv)


class Training:
    """Trainings in processes of their own, forked from this one so that they need not import anything."""

    def __init__(self, config, data, out):
        self.config, self.out = config, out
        self.options = [f"data_root={data}"]
        for phase, step in (("train", 2), ("val", 1), ("test", 1)):
            self.options.append(f"{phase}_dataloader.dataset.pipeline.{step}.scale=(96,64)")
        self.context = multiprocessing.get_context("fork")
        self.visits = self.context.Array("i", len(PHASES), lock=False)

    def start(self, work_dir, *more):
        """Start one; `visits` counts how often it enters each phase."""
        self.visits[:] = [0] * len(PHASES)
        process = self.context.Process(target=self.run, args=(work_dir, *more))
        process.start()
        return process

    def run(self, work_dir, *more):
        """Run tools/train.py in this process."""
        from mmengine.hooks import Hook
        from mmengine.registry import HOOKS

        visits = self.visits

        @HOOKS.register_module()
        class PhaseHook(Hook):
            """Says what the run is doing."""

            def before_train_iter(self, *_, **__):
                visits[1] += 1

            def before_save_checkpoint(self, *_, **__):
                visits[2] += 1

            def before_val_iter(self, *_, **__):
                visits[3] += 1

        visits[0] += 1
        log = open(self.out / "console.log", "a")  # noqa: SIM115  open until the process ends
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        torch.set_num_threads(1)
        code = 1
        try:
            argv = [str(self.config), "--work-dir", str(work_dir), *more, "--cfg-options", *self.options]
            code = cli.run(load_train().main, argv)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


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


def interrupt(training, work_dir, sent, phase, reference, rng):
    """Start a training, end it in the chosen phase, and return its exit code and the phase it was really in."""
    visit = rng.randint(1, reference["visits"][phase])
    delay = rng.uniform(0, reference["seconds"] if phase == 0 else (0.05 if phase == 2 else 0.3))
    process = training.start(work_dir)
    while process.is_alive() and training.visits[phase] < visit:
        time.sleep(0.0005)
    process.join(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, sent)
    process.join(120)
    return process.exitcode


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


def trial(training, number, sent, reference, rng, out):
    """Interrupt one training and resume it; return what was seen."""
    work_dir = out / "trial"
    shutil.rmtree(work_dir, ignore_errors=True)
    phase = (0, 1, 2, 3)[number % 4]
    code = interrupt(training, work_dir, sent, phase, reference, rng)
    complete, torn, followed = survey(work_dir) if work_dir.exists() else ([], [], True)
    resumed = training.start(work_dir, "--resume", "auto")
    resumed.join(300)
    final = work_dir / reference["name"]
    same = resumed.exitcode == 0 and final.is_file() and equal(content_of(final), reference["content"])
    left = sorted(path.name for path in work_dir.glob("*.pth*") if not path.name.startswith("best_"))
    wanted = (0, -sent) if sent == signal.SIGKILL else (0, -sent, 128 + sent)
    return dict(
        signal=signal.Signals(sent).name,
        aimed_at="any moment" if phase == 0 else PHASES[phase],
        exit=code,
        complete=complete,
        torn=torn,
        survived=bool(same and not torn and followed and code in wanted and left == [reference["name"]]),
        left=left,
        resumed_exit=resumed.exitcode,
    )


def main(argv=None):
    """Torture; exit with 1 unless every run survived."""
    args = parse_args(argv)
    if args.epochs < 2 or args.images < 4 or min(args.kills, args.terms, args.workers) < 0:
        raise InputError("give at least --epochs 2 and --images 4, and no negative numbers")
    began, rng, out = time.monotonic(), random.Random(args.seed), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data"
    generate_shapes(data, num_train=args.images, num_val=4, seed=0)
    config = out / "config.py"
    base = str(ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py")
    config.write_text(CONFIG.format(base=base, workers=args.workers, epochs=args.epochs))
    load_train()
    from mmdet.utils import register_all_modules

    register_all_modules()  # here, once, instead of in every training
    training = Training(config, data, out)
    shutil.rmtree(out / "reference", ignore_errors=True)
    started = time.monotonic()
    process = training.start(out / "reference")
    process.join()
    if process.exitcode:
        raise InputError(f"the uninterrupted training failed; see {out / 'console.log'}")
    name = f"epoch_{args.epochs}.pth"
    reference = dict(name=name, content=content_of(out / "reference" / name), visits=list(training.visits))
    reference["seconds"] = time.monotonic() - started
    print(f"uninterrupted: {reference['seconds']:.1f} s, {dict(zip(PHASES, reference['visits'], strict=True))}")
    trials = []
    for sent, count in ((signal.SIGKILL, args.kills), (signal.SIGTERM, args.terms)):
        for number in range(count):
            trials.append(trial(training, number, sent, reference, rng, out))
            print(f"{len(trials):3} {trials[-1]}", flush=True)
    report(trials, began, args, out)
    if not all(one["survived"] for one in trials):
        sys.exit(1)


def report(trials, began, args, out):
    """Print and write the figures."""
    counts = Counter((one["signal"], one["aimed_at"], one["survived"], one["exit"] == 0) for one in trials)
    survived = {name: [0, 0] for name in ("SIGKILL", "SIGTERM")}
    for one in trials:
        survived[one["signal"]][0] += one["survived"]
        survived[one["signal"]][1] += 1
    figures = dict(
        survived={name: f"{good} of {total}" for name, (good, total) in survived.items()},
        torn_checkpoints=sum(len(one["torn"]) for one in trials),
        finished_before_the_signal=sum(one["exit"] == 0 for one in trials),
        by_phase={f"{sent} {phase}": 0 for sent, phase, *_ in counts},
        seconds=round(time.monotonic() - began),
        date=str(date.today()),
        settings={key: str(value) for key, value in vars(args).items() if key != "out"},
        versions=dict(python=platform.python_version(), torch=torch.__version__, mrla_mm=mrla_mm.__version__),
    )
    for (sent, phase, _, _), count in counts.items():
        figures["by_phase"][f"{sent} {phase}"] += count
    (out / "torture.json").write_text(json.dumps(dict(figures=figures, trials=trials), indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.exit(cli.run(main))
