#!/usr/bin/env python
"""Kill short trainings at random moments and check that each one resumes to the same weights.

`python .dev_scripts/crash_test.py` trains a small Mask R-CNN once without interruption. Then it
trains it again and again from scratch and ends it at a random moment of a chosen phase with kill -9
(50 times) or SIGTERM (8 times), or by a full disk (6 times). Each time it reads every file left
behind, resumes, and compares model, optimizer and schedule with the first run's, bit for bit, which
ExactResumeHook promises on a CPU. The figures go to OUT/crash_test.json.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import mmengine.config.config
import torch

from mrla_mm import cli
from mrla_mm.datasets import generate_shapes
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import train  # noqa: E402

BETWEEN, TRAINING, SAVING, EVALUATING = range(4)
PHASES = ("starting or between phases", "training step", "checkpoint being written", "evaluation")
EPOCHS, IMAGES, BATCH = 2, 6, 2
TIMEOUT = 180  # seconds; a run takes a few
CONFIG = """_base_ = {base!r}
model = dict(
    roi_head=dict(bbox_head=dict(fc_out_channels=64)),
    train_cfg=dict(rpn_proposal=dict(max_per_img=20), rcnn=dict(sampler=dict(num=8))),
    test_cfg=dict(rpn=dict(max_per_img=20), rcnn=dict(max_per_img=5)),
)
train_dataloader = dict(batch_size={batch})
val_dataloader = dict(batch_size={batch})
train_cfg = dict(max_epochs={epochs})
default_hooks = dict(
    logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=1, save_best="coco/bbox_mAP", rule="greater")
)
custom_hooks = [
    dict(type="ExactResumeHook"),
    dict(type="PhaseHook", priority="VERY_HIGH"),
    dict(type="PhaseEndHook", priority="LOWEST"),
]
randomness = dict(seed=1)
"""


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="crash_test.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="runs ended by kill -9")
    parser.add_argument("--terms", type=int, default=8, help="runs ended by SIGTERM")
    parser.add_argument("--full", type=int, default=6, help="runs ended by a full disk")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/crash_test"))
    return parser.parse_args(argv)


class Training:
    """Trainings in processes of their own, forked from this one so that they need not import anything.

    Attributes:
        phase: the phase that the current one is in.
        visits: how often it has entered each phase.
        seconds: how long it has spent in each phase; of the time between phases only that before
            the first step.
    """

    def __init__(self, config, data, out):
        self.config, self.out = config, out
        self.options = [f"data_root={data}"]
        for loader, step in (("train", 2), ("val", 1), ("test", 1)):
            self.options.append(f"{loader}_dataloader.dataset.pipeline.{step}.scale=(96,64)")
        self.context = multiprocessing.get_context("fork")
        self.phase = self.context.Value("i", BETWEEN, lock=False)
        self.visits = self.context.Array("i", len(PHASES), lock=False)
        self.seconds = self.context.Array("d", len(PHASES), lock=False)

    def start(self, work_dir, *more, file_limit=None):
        """Start a training; `file_limit` is the size in bytes of the largest file that it can write."""
        self.phase.value = BETWEEN
        self.visits[:], self.seconds[:] = [1, 0, 0, 0], [0.0] * len(PHASES)
        process = self.context.Process(
            target=self.run, args=(work_dir, *more), kwargs=dict(file_limit=file_limit)
        )
        process.start()
        return process

    def run(self, work_dir, *more, file_limit):
        """Run tools/train.py in this process, which ends with it."""
        os.setsid()  # so that its workers can be killed with it
        self.since = time.monotonic()
        self.register_hooks()
        log = os.open(self.out / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        code = 1
        try:
            argv = [
                str(self.config),
                "--work-dir",
                str(work_dir),
                *more,
                "--cfg-options",
                *self.options,
            ]
            code = cli.run(train.main, argv)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def change_phase(self, phase):
        """Note that a phase begins, or that one has ended (BETWEEN)."""
        now = time.monotonic()
        if self.phase.value != BETWEEN or not self.visits[TRAINING]:
            self.seconds[self.phase.value] += now - self.since
        self.since, self.phase.value = now, phase
        self.visits[phase] += phase != BETWEEN

    def register_hooks(self):
        """Register the hooks that report the phases, one in front of the checkpoint hook and one behind it."""
        from mmengine.hooks import Hook
        from mmengine.registry import HOOKS

        change = self.change_phase

        @HOOKS.register_module()
        class PhaseHook(Hook):
            """Reports what begins."""

            def before_train_iter(self, *_, **__):
                change(TRAINING)

            def before_save_checkpoint(self, *_, **__):
                change(SAVING)

            def before_val_iter(self, *_, **__):
                change(EVALUATING)

        @HOOKS.register_module()
        class PhaseEndHook(Hook):
            """Reports what has ended."""

            def end(self, *_, **__):
                change(BETWEEN)

            after_train_iter = after_train_epoch = after_val_epoch = end


def content_of(checkpoint):
    """Return everything in a checkpoint that decides how training goes on."""
    content = torch.load(checkpoint, weights_only=True)
    progress = {key: content["meta"][key] for key in ("epoch", "iter")}
    return dict(
        progress=progress,
        **{key: content[key] for key in ("state_dict", "optimizer", "param_schedulers")},
    )


def equal(one, other):
    """Whether two nested values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return one == other


def wait_for(process):
    """Wait for a training to end and return its exit code, None if it hangs.

    Its data loading workers may outlive it, blocked on a batch that nobody takes; they are killed.
    """
    deadline = time.monotonic() + TIMEOUT
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return code


def signal_trial(training, phase, signum, reference, rng, work_dir):
    """End a training with a signal during a phase, resume it, and return what was seen."""
    code = 0
    while code == 0:  # a run that had finished before the signal came does not count
        shutil.rmtree(work_dir, ignore_errors=True)
        visit = rng.randint(1, reference["visits"][phase])
        delay = rng.uniform(0, reference["seconds"][phase] / reference["visits"][phase])
        process = training.start(work_dir)
        while process.is_alive() and training.visits[phase] < visit:
            time.sleep(0.0005)
        process.join(delay)
        found = training.phase.value
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)
        code = wait_for(process)
        if signum == signal.SIGKILL:
            found = training.phase.value  # it may have moved on until the signal arrived
    expected = code == -signum or (signum == signal.SIGTERM and code == 128 + signum)
    row = dict(
        ended_by=signal.Signals(signum).name, phase=PHASES[found], exit=code, expected=expected
    )
    return row | outcome(training, reference, work_dir)


@contextlib.contextmanager
def small_disk(folder, size):
    """Mount a file system of so many bytes, if the system allows it; yield a function that enlarges it, or None."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount")
        and not subprocess.run(mount, capture_output=True, check=False).returncode
    )

    def enlarge():
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)

    try:
        yield enlarge if mounted else None
    finally:
        if mounted:
            subprocess.run(
                ["umount", "--lazy", str(folder)], check=True
            )  # killed workers may still be ending


def full_disk_trial(training, reference, rng, work_dir):
    """Train on a disk too small for the checkpoints, make room, resume, and return what was seen."""
    shutil.rmtree(work_dir, ignore_errors=True)
    size = reference["bytes"]
    with small_disk(
        work_dir, int(size * rng.uniform(0.2, 1.9))
    ) as enlarge:  # never room for a second checkpoint
        file_limit = None if enlarge else int(size * rng.uniform(0.1, 0.9))
        code = wait_for(training.start(work_dir, file_limit=file_limit))
        expected = code in (1, 2) and not list(work_dir.glob("*.part"))
        row = dict(
            ended_by="full disk",
            phase="tmpfs" if enlarge else "RLIMIT_FSIZE",
            exit=code,
            expected=expected,
        )
        if enlarge:
            enlarge()
        return row | outcome(training, reference, work_dir)


def outcome(training, reference, work_dir):
    """Read what an ended run left behind, resume it, and compare its end with the uninterrupted run's."""
    torn = []
    for path in sorted(work_dir.glob("*.pth")):
        try:
            torch.load(path, weights_only=True)
        except Exception:
            torn.append(path.name)
    record = work_dir / "last_checkpoint"
    valid_record = not record.exists() or Path(record.read_text()).is_file()
    code = wait_for(training.start(work_dir, "--resume", "auto"))
    final = work_dir / reference["name"]
    same = code == 0 and final.is_file() and equal(content_of(final), reference["content"])
    left = sorted(
        path.name for path in work_dir.glob("*.pth*") if not path.name.startswith("best_")
    )
    intact = not torn and valid_record and left == [reference["name"]]
    return dict(torn=torn, valid_record=valid_record, left=left, same=same, intact=intact)


def train_reference(training, work_dir):
    """Run the training without interruption; return its result, and how often and how long it was in each phase."""
    shutil.rmtree(work_dir, ignore_errors=True)
    if wait_for(training.start(work_dir)) != 0:
        raise InputError(f"the uninterrupted training failed; see {training.out / 'console.log'}")
    final = work_dir / f"epoch_{EPOCHS}.pth"
    counts = dict(visits=list(training.visits), seconds=list(training.seconds))
    return dict(name=final.name, content=content_of(final), bytes=final.stat().st_size, **counts)


def main(argv=None):
    """Run all trials; exit with 1 unless every one survived."""
    args = parse_args(argv)
    began, rng, out = time.monotonic(), random.Random(args.seed), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    data, config, work_dir = out / "data", out / "config.py", out / "trial"
    generate_shapes(data, num_train=IMAGES, num_val=BATCH, seed=0)
    base = str(ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py")
    config.write_text(CONFIG.format(base=base, epochs=EPOCHS, batch=BATCH))
    from mmdet.utils import register_all_modules

    register_all_modules()  # once here instead of in every training
    # Checkpoints carry the config as text, and formatting it nicely would take most of these short
    # runs.
    mmengine.config.config.FormatCode = lambda text, **_: (text, True)
    training = Training(config, data, out)
    reference = train_reference(training, out / "reference")
    trials = []
    for signum, count in (
        (signal.SIGKILL, args.kills),
        (signal.SIGTERM, args.terms),
        (None, args.full),
    ):
        for number in range(count):
            if signum is None:
                row = full_disk_trial(training, reference, rng, work_dir)
            else:
                phase = (SAVING, TRAINING, EVALUATING, BETWEEN)[number % 4]
                row = signal_trial(training, phase, signum, reference, rng, work_dir)
            trials.append(row | dict(survived=row["expected"] and row["same"] and row["intact"]))
            print(f"{len(trials):3} {trials[-1]}", flush=True)
    table = {}
    for row in trials:
        table.setdefault(f"{row['ended_by']}, {row['phase']}", []).append(row["survived"])
    figures = dict(
        survived={name: f"{sum(found)} of {len(found)}" for name, found in sorted(table.items())},
        all=f"{sum(row['survived'] for row in trials)} of {len(trials)}",
        torn_checkpoints=sum(len(row["torn"]) for row in trials),
        minutes=round((time.monotonic() - began) / 60, 1),
    )
    (out / "crash_test.json").write_text(
        json.dumps(dict(figures=figures, trials=trials), indent=1) + "\n"
    )
    print(json.dumps(figures, indent=1))
    if not all(row["survived"] for row in trials):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
