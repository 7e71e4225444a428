#!/usr/bin/env python
"""Train a small MRLA detector on generated shapes, evaluate it and draw what it finds: minutes on two CPU cores.

Run it again and it keeps what is there; interrupt it and it resumes. With --data-only it writes the
data set alone.
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

from mrla_mm import __version__, cli
from mrla_mm.config import read_config
from mrla_mm.datasets import generate_shapes
from mrla_mm.errors import InputError

TOOLS = Path(__file__).resolve().parent
CONFIG = TOOLS.parent / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
# What a newcomer wants to see of the tools' output; all of it is in the log file of each step.
SHOWN = re.compile(r"Epoch\((train|val|test)\)|error:")
LOG_PREFIX = re.compile(r"^\S+ \S+ - mmengine - INFO - ")
MAX_THREADS = 4  # a model this small gains nothing from more
PICTURES = 12


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="quickstart.py", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(CONFIG), help="quick-start config to train")
    parser.add_argument(
        "--data", default="data/shapes", help="folder of the generated data set, in COCO's layout"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("work_dirs/quickstart"), help="folder for all results"
    )
    parser.add_argument("--num-train", type=int, default=800, help="images to train on")
    parser.add_argument("--num-val", type=int, default=100, help="images to evaluate on")
    parser.add_argument("--size", type=int, default=160, help="longer side of the images in pixels")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the data set and of the training"
    )
    parser.add_argument(
        "--epochs", type=int, help="train for so many epochs instead of the config's"
    )
    parser.add_argument("--data-only", action="store_true", help="write the data set and stop")
    parser.add_argument(
        "--fresh", action="store_true", help="discard earlier results and start over"
    )
    parser.add_argument(
        "--min-ap50", type=float, help="exit with code 1 when the box AP50 ends up below this"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def step(title):
    """Announce a step of the run, and report its time with the message that it leaves in the list."""
    start, said = time.perf_counter(), []
    print(f"\n{title}", flush=True)
    yield said
    print(f"      {', '.join(said)} ({time.perf_counter() - start:.0f} s)", flush=True)


def run_tool(name, *arguments, log_file):
    """Run a tool, showing the matching lines of its output; all of it goes to the log file.

    Raises:
        InputError: the tool failed; the end of its output has been printed.
    """
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TOOLS.parent), environment.get("PYTHONPATH")])
    )
    threads = min(MAX_THREADS, (os.cpu_count() or 1) - 1)  # the data loader has a core of its own
    environment.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    environment.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that spin make a busy machine several times slower
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    with log_file.open("a") as log, subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            for line in process.stdout:
                log.write(line)
                lines = [*lines[-40:], line]
                if SHOWN.search(line):
                    print("      " + LOG_PREFIX.sub("", line).rstrip(), flush=True)
        except KeyboardInterrupt:
            process.terminate()
            raise KeyboardInterrupt(
                "the same command continues from the last complete epoch"
            ) from None
    if process.returncode:
        print("".join(lines), file=sys.stderr)
        raise InputError(
            f"{name}.py failed; its output is in {log_file}. The same command resumes, --fresh starts over"
        )


def load_config(args):
    """Return the config with the data folder, seed and number of epochs of this run."""
    options = {"data_root": str(Path(args.data).absolute()), "randomness": dict(seed=args.seed)}
    if args.epochs is not None:
        options["train_cfg.max_epochs"] = args.epochs
    cfg = read_config(args.config, options)
    cfg.param_scheduler[-1].end = cfg.train_cfg.max_epochs
    return cfg


def train(cfg, args):
    """Train, resume or keep a finished training; return its last checkpoint and what was done."""
    state_file, train_dir, config_file = (
        args.work_dir / name for name in ("quickstart.json", "train", "config.py")
    )
    identity = (
        f"{cfg.pretty_text}\n{args.num_train} {args.num_val} {args.size} {args.seed}\n{__version__}"
    )
    state = {"fingerprint": hashlib.sha256(identity.encode()).hexdigest(), "finished": False}
    known = json.loads(state_file.read_text()) if state_file.is_file() else {}
    if args.fresh or known.get("fingerprint") != state["fingerprint"]:
        shutil.rmtree(train_dir, ignore_errors=True)
        known = state
    said = "finished training kept"
    if not known["finished"]:
        said = (
            "training resumed and finished" if any(train_dir.glob("*.pth")) else "training finished"
        )
        state_file.write_text(json.dumps(state))
        cfg.dump(config_file)
        run_tool(
            "train",
            config_file,
            "--work-dir",
            train_dir,
            "--resume",
            log_file=args.work_dir / "train.log",
        )
        state_file.write_text(json.dumps({**state, "finished": True}))
    return train_dir / Path((train_dir / "last_checkpoint").read_text().strip()).name, said


def evaluate(checkpoint, work_dir):
    """Evaluate with pycocotools; return the metrics."""
    test_dir = work_dir / "test"
    shutil.rmtree(test_dir, ignore_errors=True)
    run_tool(
        "test",
        work_dir / "config.py",
        checkpoint,
        "--work-dir",
        test_dir,
        log_file=work_dir / "test.log",
    )
    (report,) = test_dir.glob("*/*.json")
    return json.loads(report.read_text().splitlines()[-1])


def draw(cfg, checkpoint, work_dir):
    """Write the comparison pictures, a sheet of them and the training curves."""
    import mmcv
    from mmdet.apis import init_detector
    from mmdet.registry import DATASETS
    from mmdet.utils import register_all_modules

    from mrla_mm.analysis.curves import draw_training_curves, read_scalars, training_logs
    from mrla_mm.analysis.gallery import contact_sheet, predict_and_compare

    register_all_modules()
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    model = init_detector(cfg, str(checkpoint), device="cpu")
    indices = range(min(PICTURES, len(dataset)))
    pictures = []
    for name, picture in predict_and_compare(model, dataset, indices, score_thr=0.5):
        pictures.append(picture[..., ::-1])
        mmcv.imwrite(pictures[-1], str(work_dir / f"pictures/{Path(name).stem}.png"))
    mmcv.imwrite(contact_sheet(pictures, width=960), str(work_dir / "gallery.png"))
    draw_training_curves(*read_scalars(training_logs(work_dir / "train"))).savefig(
        work_dir / "curves.png", dpi=120
    )


def main(argv=None):
    """Run the four steps."""
    args = parse_args(argv)
    start = time.perf_counter()
    with step(
        f"[1/4] data: {args.num_train} + {args.num_val} pictures of shapes, in COCO format"
    ) as said:
        sizes = dict(num_train=args.num_train, num_val=args.num_val, size=args.size, seed=args.seed)
        said.append(
            f"{args.data} {'written' if generate_shapes(args.data, **sizes) else 'was there and intact, kept'}"
        )
    if args.data_only:
        return
    cfg = load_config(args)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    with step(
        f"[2/4] training: {Path(args.config).name}, {cfg.train_cfg.max_epochs} epochs"
    ) as said:
        checkpoint, message = train(cfg, args)
        said.append(message)
    with step("[3/4] evaluation with pycocotools") as said:
        metrics = evaluate(checkpoint, args.work_dir)
        said.append(f"{args.num_val} pictures the training has not seen")
    with (
        step("[4/4] pictures and plots") as said,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        draw(cfg, checkpoint, args.work_dir)
        said.append(
            f"{args.work_dir}/gallery.png, {args.work_dir}/pictures/, {args.work_dir}/curves.png"
        )
    ap50 = metrics.get(
        "coco/bbox_mAP_50", 0.0
    )  # mmdet reports no metric when nothing at all was detected
    segm = f", mask AP50 {metrics['coco/segm_mAP_50']:.3f}" if "coco/segm_mAP_50" in metrics else ""
    print(f"\nbox AP50 {ap50:.3f}{segm} after {time.perf_counter() - start:.0f} s in all")
    print(
        f"look at    {args.work_dir}/gallery.png (ground truth | prediction) and {args.work_dir}/curves.png"
    )
    demo, weights = (os.path.relpath(path) for path in (TOOLS / "demo.py", checkpoint))
    print(
        f"try next   {sys.executable} {demo} {args.data}/val2017 {args.work_dir}/config.py --weights {weights}"
    )
    if args.min_ap50 is not None and ap50 < args.min_ap50:
        sys.exit(f"box AP50 {ap50:.3f} is below --min-ap50 {args.min_ap50}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
