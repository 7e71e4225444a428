#!/usr/bin/env python
"""Train a small detector with and without attention on BCCD from several seeds; compare AP.

`python .dev_scripts/evidence.py --data-root bccd` skips runs that an earlier call has finished.
Runs with the same seed start from identical shared weights and see the same images. It prints the
table of docs/benchmarks.md and writes OUT/bccd.csv, a row a run, and OUT/bccd.svg, of docs/tables
and docs/_static.
"""

import argparse
import csv
import itertools
import json
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.runner import Runner, set_random_seed
from torch import nn

from measure import as_markdown
from mrla_mm import cli
from mrla_mm.config import read_config

BASE = "mrla_mm::quickstart/faster_rcnn_r50_quarter_mrla_light.py"
PLUGIN = dict(position="after_conv3")
VARIANTS = {  # what a backbone differs in
    "plain": dict(type="ComparatorResNet"),
    "SE": dict(type="ComparatorResNet", plugins=[dict(PLUGIN, cfg=dict(type="SE"))]),
    "ECA": dict(type="ComparatorResNet", plugins=[dict(PLUGIN, cfg=dict(type="ECA"))]),
    "MRLA-light": dict(type="MRLAResNet", layer_attention=dict(type="MRLALight", head_channels=32)),
    "MRLA-base": dict(type="MRLAResNet", layer_attention=dict(type="MRLABase", head_channels=32)),
}
METRICS = {"AP": "coco/bbox_mAP", "AP50": "coco/bbox_mAP_50"}
CLASSES = ("RBC", "WBC", "Platelets")


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="evidence.py", description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, required=True, help="BCCD in COCO's format")
    parser.add_argument("--seeds", type=int, default=5, help="two at least")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/evidence"))
    return parser.parse_args(argv)


def make_config(variant: str, seed: int, args: argparse.Namespace) -> Config:
    """Build the config of a run."""
    cfg = read_config(BASE, {})
    for key in ("layer_attention", "init_cfg"):
        cfg.model.backbone.pop(key, None)
    if variant in ("plain", "SE", "ECA"):
        del cfg.model.backbone["zero_init_attention"]
    cfg.model.backbone.update(VARIANTS[variant])
    cfg.model.roi_head.bbox_head.num_classes = len(CLASSES)
    data = dict(data_root=str(args.data_root), data_prefix=dict(img="JPEGImages"))
    data |= dict(metainfo=dict(classes=CLASSES))
    for split in ("train", "test"):
        cfg[f"{split}_dataloader"].dataset.update(ann_file=f"annotations/{split}.json", **data)
    cfg.test_evaluator.ann_file = str(args.data_root / "annotations/test.json")
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    cfg.randomness = dict(seed=seed)
    cfg.work_dir = str(args.out / f"{variant}_{seed}")
    return cfg


def share_initial_weights(model: nn.Module, plain_config: Config) -> None:
    """Initialize a detector; what the plain one has too starts as in the plain one of this seed."""
    model.init_weights()
    set_random_seed(plain_config.randomness.seed)
    plain = MODELS.build(plain_config.model)
    plain.init_weights()
    model.load_state_dict(plain.state_dict(), strict=False)


def run(file: Path, variant: str, seed: int, args: argparse.Namespace) -> None:
    """Train and test a detector; write what was found to a file."""
    torch.set_num_threads(1)
    runner = Runner.from_cfg(make_config(variant, seed, args))
    share_initial_weights(runner.model, make_config("plain", seed, args))
    runner.train()
    found = runner.test()
    parameters = sum(p.numel() for p in runner.model.parameters())
    row = dict(model=variant, seed=seed, parameters=parameters)
    row |= {name: round(100 * found[key], 1) for name, key in METRICS.items()}
    file.write_text(json.dumps(row))


def summarize(rows: list[dict]) -> list[dict]:
    """Mean and standard error of each model, and of the difference to plain with the same seed."""

    def show(values):
        error = statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.mean(values):.1f} ± {error:.1f}"

    plain = {row["seed"]: row["AP"] for row in rows if row["model"] == "plain"}
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        shown = {metric: show([row[metric] for row in own]) for metric in METRICS}
        gain = show([row["AP"] - plain[row["seed"]] for row in own]) if model != "plain" else ""
        row = {"backbone": model, "parameters": own[0]["parameters"]}
        table.append(row | shown | {"AP over plain's": gain})
    return table


def draw(rows: list[dict]) -> Figure:
    """Plot every run as a dot, the runs of a seed joined, and the mean of a model as a bar."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    models = [*dict.fromkeys(row["model"] for row in rows)]
    for axes, metric in zip(figure.subplots(1, len(METRICS)), METRICS, strict=True):
        values = {(row["model"], row["seed"]): row[metric] for row in rows}
        seeds = {row["seed"] for row in rows}
        for seed in seeds:
            run_values = [values[model, seed] for model in models]
            axes.plot(models, run_values, "o-", color="tab:blue", lw=0.4, ms=4)
        means = [statistics.mean(values[model, seed] for seed in seeds) for model in models]
        axes.plot(models, means, "_", color="tab:red", ms=24, mew=2)
        axes.set_title(f"{metric} on BCCD's test images", fontsize=10)
    return figure


def main(argv=None):
    """Run what is missing; print and write what was found."""
    args = parse_args(argv)
    runs = {}
    for seed, name in itertools.product(range(args.seeds), VARIANTS):
        runs[args.out / f"{name}_{seed}/result.json"] = name, seed
    fresh = dict(mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with ProcessPoolExecutor(args.jobs, **fresh) as pool:
        missing = [file for file in runs if not file.exists()]
        futures = [pool.submit(run, file, *runs[file], args) for file in missing]
        for future in futures:
            future.result()
    rows = [json.loads(file.read_text()) for file in runs]
    with (args.out / "bccd.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([rows[0], *(row.values() for row in rows)])
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):
        draw(rows).savefig(args.out / "bccd.svg")
    print(as_markdown(summarize(rows)))


if __name__ == "__main__":
    sys.exit(cli.run(main))
