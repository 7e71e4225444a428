#!/usr/bin/env python
"""Write the report of a training run as one page of HTML that opens offline: `python tools/report.py WORK_DIR`.

Run facts, training curves, AP by epoch, ground truth beside predictions, AP by size and class, error breakdown,
precision-recall curves and confusion matrix. Config, checkpoint and logs are found in the work directory. Predictions
are those of --results, or of WORK_DIR/report/predictions.pkl, which tools/test.py is run for unless it has those of
the checkpoint and config.
"""

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import mrla_mm
from mrla_mm import cli, outputs
from mrla_mm.errors import InputError

# isort: split
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.registry import init_default_scope
from pycocotools.coco import COCO

from mrla_mm.analysis import report, work_dirs
from mrla_mm.analysis.coco_results import read_detections
from mrla_mm.analysis.html_page import page
from mrla_mm.analysis.logs import read_scalars
from mrla_mm.datasets.checks import check_annotations, class_names, dataset_class, is_coco
from mrla_mm.datasets.config_parts import is_local, placed_datasets
from mrla_mm.trained import read_contents

TEST_TOOL = Path(__file__).resolve().with_name("test.py")


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work_dir", help="work directory of the run")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: WORK_DIR/report/report.html")
    parser.add_argument("--config", help="instead of the one in the work directory")
    parser.add_argument("--checkpoint", help="instead of the best or last one in the work directory")
    parser.add_argument("--results", help="predictions: from tools/test.py --out FILE.pkl, or JSON in COCO's format")
    parser.add_argument("--compare", nargs="+", default=[], metavar="WORK_DIR", help="further runs for the curves")
    parser.add_argument("--images", type=int, default=12, help="pictures in the gallery (default: 12)")
    parser.add_argument(
        "--score-thr", type=float, default=0.3, help="weaker detections are left out of gallery and confusion matrix"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )
    args = parser.parse_args(argv)
    if args.images < 1:
        raise InputError(f"--images {args.images}: give a positive number")
    if not 0 <= args.score_thr <= 1:
        raise InputError(f"--score-thr {args.score_thr}: give a number from 0 to 1")
    return args


def load_config(run, args):
    """Return the run's config with the overrides.

    Raises:
        InputError: there is none in the work directory, and none was given.
    """
    if args.config is None and run.config is None:
        raise InputError(f"work directory {run.folder} holds no config: give it with --config")
    args.config = str(args.config or run.config)
    args.launcher, args.local_rank, args.work_dir = "none", 0, str(run.folder)
    return cli.load_config(args)


def predictions(run, cfg, checkpoint, args):
    """Return the file of the predictions, made by tools/test.py unless it has those of this checkpoint and config."""
    if args.results:
        return Path(args.results)
    if checkpoint is None:
        raise InputError(f"{run.folder} holds no checkpoint to predict with: give --checkpoint or --results")
    lacking = [key for key in ("test_cfg", "test_evaluator") if not cfg.get(key)]
    if lacking:
        raise InputError(
            f"the config has no {' and no '.join(lacking)}, without which nothing is predicted: give --results"
        )
    results = run.folder / "report/predictions.pkl"
    origin, made_of = results.with_name("predictions.txt"), f"{checkpoint.resolve()}\n{cfg.pretty_text}"
    fresh = results.is_file() and results.stat().st_mtime >= checkpoint.stat().st_mtime
    if fresh and origin.is_file() and origin.read_text(encoding="utf-8") == made_of:
        print(f"predictions of {results} kept")
        return results
    results.parent.mkdir(parents=True, exist_ok=True)
    config, part = results.with_name("config.py"), results.with_name("part.pkl")
    cfg.dump(config)
    print(f"predicting with {checkpoint}, every image of the config's test data set ...", flush=True)
    command = [sys.executable, str(TEST_TOOL), str(config), str(checkpoint), "--out", str(part)]
    root = str(Path(mrla_mm.__file__).parents[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    command += ["--work-dir", str(results.with_name("test"))]
    if "logger" in cfg.get("default_hooks", {}):
        command += ["--cfg-options", "default_hooks.logger.interval=5"]
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        for line in run.stdout:
            said += line
            if progress := re.search(r"\[ *\d+/\d+\] +eta: [\d:]+", line):
                print(f"  {progress.group()}", flush=True)
    if run.returncode:
        reason = re.findall(r"^error: (.*)", said, re.MULTILINE) or [said[-2000:]]
        raise InputError(f"tools/test.py ended with code {run.returncode}: {reason[-1]}")
    origin.unlink(missing_ok=True)
    part.replace(results)
    origin.write_text(made_of, encoding="utf-8")
    return results


def read_dataset(cfg):
    """Return the test data set of the config, its annotations, and the file of each image.

    Raises:
        InputError: the config has no test data in COCO's format, or its annotation file is missing or broken.
    """
    loader = cfg.get("test_dataloader")
    if not loader:
        raise InputError("the config has no test_dataloader, whose data set the report is about: give another --config")
    init_default_scope(cfg.get("default_scope", "mmdet"))
    for place, leaf in placed_datasets(cfg, "test"):
        kind = dataset_class(leaf)
        if not (isinstance(kind, type) and issubclass(kind, CocoDataset)):
            raise InputError(f"the test data set is a {leaf.get('type')}: the report knows COCO-format ones")
        if is_coco(leaf) and is_local(leaf):
            needed = ("images", "annotations", "categories")
            check_annotations(leaf, class_names(leaf), "test", needed=needed, place=place)
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = DATASETS.build(loader["dataset"])
        if not hasattr(dataset, "cat_ids"):
            raise InputError(f"the test data set is a {type(dataset).__name__}: the report knows COCO-format ones")
        truth = COCO(dataset.ann_file)
    infos = (dataset.get_data_info(index) for index in range(len(dataset)))
    return dataset, truth, {info["img_id"]: Path(info["img_path"]) for info in infos}


def read_runs(run, others):
    """Return the records of a run by its name, and those of the runs to compare it with by theirs."""
    records = {run.name: read_scalars(run.logs)}
    for other in map(work_dirs.find_run, others):
        records[str(other.folder) if other.name in records else other.name] = read_scalars(other.logs)
    return records


def main(argv=None):
    """Write the report."""
    args = parse_args(argv)
    run = work_dirs.find_run(args.work_dir)
    out = outputs.make_place(args.out or run.folder / "report/report.html", "--out")
    cfg = load_config(run, args)
    checkpoint = Path(args.checkpoint) if args.checkpoint else run.checkpoint
    about_checkpoint = {}
    if checkpoint is not None:
        contents = read_contents(checkpoint)
        about_checkpoint = work_dirs.checkpoint_facts(checkpoint, contents.meta, contents.state)
    records = read_runs(run, args.compare)
    dataset, truth, images = read_dataset(cfg)
    results = predictions(run, cfg, checkpoint, args)
    found = read_detections(results, truth, category_ids=dataset.cat_ids, classes=dataset.metainfo["classes"])
    facts = work_dirs.run_facts(run, cfg, *records[run.name]) | about_checkpoint | work_dirs.environment(run)
    sections = report.training_sections(facts, cfg.pretty_text, *records[run.name])
    if args.compare:
        sections.insert(2, report.comparison_section(records))
    print("evaluating ...", flush=True)
    sections += report.detection_sections(found, images, dataset.metainfo, limit=args.images, score_thr=args.score_thr)
    source = args.results or (checkpoint or results).name
    subtitle = f"Predictions of {source}; written on {date.today()} by mrla_mm {mrla_mm.__version__}."
    out.write_text(page(run.name, subtitle, sections), encoding="utf-8")
    print(f"written: {out} ({out.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    sys.exit(cli.run(main))
