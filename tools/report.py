#!/usr/bin/env python
"""Write the report of a training run as one page of HTML that opens offline: `python tools/report.py WORK_DIR`.

Run facts, training curves, AP by epoch and by class, and ground truth beside predictions. Config,
checkpoint and logs are found in the work directory. AP by class needs an evaluation of the
checkpoint; --no-eval takes it from the last validation, if the config's evaluator has
classwise=True.
"""

import argparse
import sys
from collections.abc import Mapping
from datetime import date
from html import escape
from pathlib import Path

import numpy as np

from mrla_mm import __version__, cli
from mrla_mm.analysis.curves import draw_training_curves, read_scalars, training_logs
from mrla_mm.errors import InputError
from mrla_mm.inference import load_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work_dir", type=Path, help="work directory of the run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="default: report/report.html in the run's folder",
    )
    parser.add_argument("--config", help="instead of the one in the work directory")
    parser.add_argument(
        "--checkpoint", help="instead of the best or last one in the work directory"
    )
    parser.add_argument("--no-eval", action="store_true", help="do not evaluate the checkpoint")
    parser.add_argument(
        "--images", type=int, default=12, help="pictures in the gallery (default: 12)"
    )
    parser.add_argument(
        "--score-thr", type=float, default=0.3, help="hide detections below it (default: 0.3)"
    )
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def find_run(args):
    """Return the folder of a run, its logs, config and checkpoint; the quick start keeps its run in `train`."""
    folder = next(
        (path for path in (args.work_dir, args.work_dir / "train") if training_logs(path)), None
    )
    if folder is None:
        raise InputError(f"{args.work_dir} has no training log (*/vis_data/scalars.json)")
    by_time = lambda pattern: sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)  # noqa: E731
    config = args.config or next(iter(by_time("*.py")[::-1]), None)
    checkpoint = args.checkpoint or next(
        iter((by_time("best_*.pth") or by_time("*.pth"))[::-1]), None
    )
    for what, path in (("config", config), ("checkpoint", checkpoint)):
        if path is None:
            raise InputError(f"{folder} has no {what}: give it with --{what}")
    return folder, training_logs(folder), str(config), str(checkpoint)


def evaluate(cfg, checkpoint, work_dir):
    """Evaluate a checkpoint on the test set; return the metrics, AP of each class included."""
    evaluators = (
        [cfg.test_evaluator] if isinstance(cfg.test_evaluator, Mapping) else cfg.test_evaluator
    )
    for evaluator in evaluators:
        if evaluator.type == "CocoMetric":
            evaluator.classwise = True
    cfg.load_from, cfg.resume, cfg.work_dir, cfg.launcher = checkpoint, False, str(work_dir), "none"
    return cli.build_runner(cfg).test()


def gallery(model, cfg, count, score_thr):
    """Return images spread evenly over the test set, ground truth on the left, predictions on the right."""
    from mmdet.registry import DATASETS

    from mrla_mm.analysis import report
    from mrla_mm.analysis.gallery import predict_and_compare

    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    model.cfg = cfg
    indices = sorted(
        {round(index) for index in np.linspace(0, len(dataset) - 1, min(count, len(dataset)))}
    )
    found = predict_and_compare(model, dataset, indices, score_thr)
    pictures = [report.figure(picture, name) for name, picture in found]
    note = f"{len(pictures)} of {len(dataset)} images, predictions that score at least {score_thr}."
    return f"<p>{note}</p>{''.join(pictures)}"


def main(argv=None):
    """Write the report."""
    args = parse_args(argv)
    from mrla_mm.analysis import report

    folder, logs, config, checkpoint = find_run(args)
    out = args.out or folder / "report/report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    train, val = read_scalars(logs)
    model, cfg, _ = load_model(config, checkpoint, options=args.cfg_options)
    facts = [{"": name, " ": text} for name, text in report.run_facts(cfg, train, val).items()]
    text = f"<details><summary>the whole config</summary><pre>{escape(cfg.pretty_text)}</pre></details>"
    sections = {
        "Run": report.table(facts, head=False) + text,
        "Training curves": report.figure(
            draw_training_curves(train, val), "losses, learning rate and validation"
        ),
        "AP by epoch": report.table(report.epoch_rows(val)),
        "Ground truth beside predictions": gallery(model, cfg, args.images, args.score_thr),
    }
    metrics = val[-1] if args.no_eval and val else {}
    if not args.no_eval:
        print(f"evaluating {checkpoint} ...", flush=True)
        metrics = evaluate(cfg, checkpoint, folder / "report/test")
    sections["AP by class"] = report.table(report.class_rows(metrics))
    name = folder.parent.name if folder != args.work_dir else folder.resolve().name
    subtitle = f"Predictions of {Path(checkpoint).name}; written on {date.today()} by mrla_mm {__version__}."
    out.write_text(report.page(name, subtitle, sections), encoding="utf-8")
    print(f"written: {out} ({out.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    sys.exit(cli.run(main))
