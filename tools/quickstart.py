#!/usr/bin/env python
"""Train a small MRLA detector on generated shapes, evaluate it and draw what it finds: minutes on two CPU cores.

Run it again and it keeps what is there; interrupt it and it resumes.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from mmdet.apis import init_detector
from mmdet.registry import DATASETS
from mmdet.utils import register_all_modules

from mrla_mm import cli
from mrla_mm.analysis.gallery import contact_sheet, write_gallery
from mrla_mm.analysis.logs import training_logs
from mrla_mm.analysis.plots import plot_training_curves
from mrla_mm.datasets.shapes import generate_shapes
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
# What a newcomer wants to see of the tools' logs; the whole of them is in the log file of each step.
PROGRESS = re.compile(r"Epoch\((train|val)\)|error:")
SUMMARY = re.compile(r"Average (Precision|Recall)|error:")
LOG_PREFIX = re.compile(r"^\S+ \S+ - mmengine - INFO - ")
MAX_THREADS = 4  # a model this small gains nothing from more
PICTURES = 12
MAX_SEED = 2**32 - 1  # numpy's, which the training seeds too


class Steps:
    """Numbers the steps of the run and times them."""

    def __init__(self, total):
        self.total, self.number, self.started = total, 0, time.perf_counter()

    def start(self, title):
        """Announce the next step."""
        self.number += 1
        self.step_started = time.perf_counter()
        print(f"\n[{self.number}/{self.total}] {title}", flush=True)

    def done(self, message):
        """Report the end of the step with its time."""
        print(f"      {message} ({time.perf_counter() - self.step_started:.0f} s)", flush=True)

    @property
    def seconds(self):
        """Time since the first step."""
        return time.perf_counter() - self.started


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="quickstart.py", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(CONFIG), help="quick-start config to train")
    parser.add_argument("--data", default="data/shapes", help="folder of the generated data set")
    parser.add_argument("--work-dir", default="work_dirs/quickstart", help="folder for all results")
    parser.add_argument("--num-train", type=int, default=800, help="images to train on")
    parser.add_argument("--num-val", type=int, default=100, help="images to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data set and of the training")
    parser.add_argument("--epochs", type=int, help="train for so many epochs instead of the config's")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results and start over")
    parser.add_argument("--min-ap50", type=float, help="exit with code 1 when the box AP50 ends up below this")
    return parser.parse_args(argv)


def run_tool(arguments, log_file, *, shown):
    """Run a tool of this repository, showing the matching lines of its output; all of it goes to the log file.

    Raises:
        InputError: the tool failed; the end of its output has been printed.
    """
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment.setdefault("OMP_NUM_THREADS", str(min(MAX_THREADS, os.cpu_count() or 1)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin make a busy machine several times slower
    log_file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with (
        log_file.open("a") as log,
        subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process,
    ):
        try:
            for line in process.stdout:
                log.write(line)
                lines = [*lines[-40:], line]
                if shown.search(line):
                    print("      " + LOG_PREFIX.sub("", line).rstrip(), flush=True)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode:
        print("".join(lines), file=sys.stderr)
        raise InputError(
            f"{arguments[0]} ended with code {process.returncode}; the end of its output is above, all of it in "
            f"{log_file}. Running the quick start again resumes it, --fresh starts over"
        )


def fingerprint(cfg, args):
    """Return what identifies a training run: the resolved config and the generated data."""
    text = f"{cfg.pretty_text}\n{args.num_train} {args.num_val} {args.seed}\n{mrla_mm.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def train(cfg, args, work_dir):
    """Train, resume or keep a finished training; return its last checkpoint and what was done."""
    state_file, train_dir = work_dir / "quickstart.json", work_dir / "train"
    identity = fingerprint(cfg, args)
    try:
        state = json.loads(state_file.read_text())
    except (OSError, ValueError):
        state = None
    if args.fresh or not isinstance(state, dict) or state.get("fingerprint") != identity:
        shutil.rmtree(train_dir, ignore_errors=True)
        state = {"fingerprint": identity, "checkpoint": None}
    elif state.get("checkpoint") and Path(state["checkpoint"]).is_file():
        return Path(state["checkpoint"]), "finished training kept"
    state_file.write_text(json.dumps(state))
    config_file = work_dir / "config.py"
    cfg.dump(config_file)
    resumed = any(train_dir.glob("*.pth"))
    run_tool(
        [str(ROOT / "tools/train.py"), str(config_file), "--work-dir", str(train_dir), "--resume", "auto"],
        work_dir / "train.log",
        shown=PROGRESS,
    )
    state["checkpoint"] = str(Path((train_dir / "last_checkpoint").read_text().strip()).resolve())
    state_file.write_text(json.dumps(state))
    return Path(state["checkpoint"]), "training resumed and finished" if resumed else "training finished"


def evaluate(work_dir, checkpoint):
    """Evaluate with pycocotools through tools/test.py; return its metrics."""
    test_dir = work_dir / "test"
    shutil.rmtree(test_dir, ignore_errors=True)
    run_tool(
        [
            str(ROOT / "tools/test.py"),
            str(work_dir / "config.py"),
            str(checkpoint),
            "--work-dir",
            str(test_dir),
        ],
        work_dir / "test.log",
        shown=SUMMARY,
    )
    (report,) = test_dir.glob("*/*.json")
    return json.loads(report.read_text().splitlines()[-1])


def draw(cfg, checkpoint, work_dir):
    """Write the comparison pictures, a sheet of them and the training curves."""
    register_all_modules()
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    model = init_detector(cfg, str(checkpoint), device="cpu")
    folder = work_dir / "pictures"
    shutil.rmtree(folder, ignore_errors=True)
    pictures = write_gallery(model, dataset, folder, indices=range(min(PICTURES, len(dataset))), score_thr=0.5)
    contact_sheet(pictures, work_dir / "gallery.png", width=960)
    plot_training_curves(training_logs(work_dir / "train"), work_dir / "curves.png")


def load_config(args):
    """Return the config with the data folder, seed and number of epochs of this run."""
    if not 0 <= args.seed <= MAX_SEED:
        raise InputError(f"--seed {args.seed}: give a number from 0 to {MAX_SEED}")
    cfg = cli.read_config(args.config, {})
    cli.move_data_root(cfg, str(Path(args.data).absolute()))
    cfg.randomness = dict(seed=args.seed)
    if args.epochs is not None:
        if args.epochs < 1:
            raise InputError(f"--epochs {args.epochs}: give a positive number")
        cfg.train_cfg.max_epochs = args.epochs
        cfg.param_scheduler[-1].end = args.epochs
    return cfg


def main(argv=None):
    """Run the four steps."""
    args = parse_args(argv)
    cfg = load_config(args)
    work_dir = Path(args.work_dir)
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--work-dir {work_dir} cannot be made ({error.strerror}): give another folder") from error
    steps = Steps(4)

    steps.start(f"data: {args.num_train} + {args.num_val} pictures of shapes, in COCO format")
    written = generate_shapes(args.data, num_train=args.num_train, num_val=args.num_val, seed=args.seed)
    steps.done(f"{args.data} {'written' if written else 'was there and intact, kept'}")

    steps.start(f"training: {Path(args.config).name}, {cfg.train_cfg.max_epochs} epochs")
    checkpoint, message = train(cfg, args, work_dir)
    steps.done(message)

    steps.start("evaluation with pycocotools")
    metrics = evaluate(work_dir, checkpoint)
    steps.done(f"{args.num_val} pictures the training has not seen")

    steps.start("pictures and plots")
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # what the libraries say while loading
        warnings.simplefilter("ignore")
        draw(cfg, checkpoint, work_dir)
    steps.done(f"{work_dir}/gallery.png, {work_dir}/pictures/, {work_dir}/curves.png")

    ap50 = metrics.get("coco/bbox_mAP_50", 0.0)  # mmdet reports no metric when nothing at all was detected
    segm = f", mask AP50 {metrics['coco/segm_mAP_50']:.3f}" if "coco/segm_mAP_50" in metrics else ""
    print(f"\nbox AP50 {ap50:.3f}{segm} after {steps.seconds:.0f} s in all")
    print(f"look at    {work_dir}/gallery.png (ground truth | prediction) and {work_dir}/curves.png")
    demo, weights = (os.path.relpath(path) for path in (ROOT / "tools/demo.py", checkpoint))
    print(f"try next   {sys.executable} {demo} {args.data}/val2017 {work_dir}/config.py {weights}")
    if args.min_ap50 is not None and ap50 < args.min_ap50:
        sys.exit(f"box AP50 {ap50:.3f} is below --min-ap50 {args.min_ap50}")


def resumable(argv=None):
    """Run the steps; Ctrl-C says how to go on."""
    try:
        main(argv)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on from the last complete epoch") from None


if __name__ == "__main__":
    sys.exit(cli.run(resumable))
