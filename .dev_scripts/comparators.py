"""The benchmark's suite `comparators`: what every system of the paper's tables costs.

Networks are those of configs/; "plain, BN folded" is ours without attention, whose frozen norms are
folded as those of all others but "plain", mmdet's. Beside the cost stand the paper's figures.
comparators.csv belongs into docs/tables.
"""

import csv
import os
import statistics

from mmengine.registry import MODELS
from torch import nn

import measure
from mrla_mm.config import read_config
from steps import Step, randomize_zero_init

# The paper's box AP of Mask R-CNN (Table 3) and Top-1 (Tables 1 and 6), both on ResNet-50.
PAPER = {
    "plain": (37.2, 76.1),
    "plain, BN folded": (37.2, 76.1),
    "se": (38.7, 76.7),
    "cbam": (None, 77.3),
    "a2": (None, 77.0),
    "aa": (None, 77.7),
    "nl": (38.0, 77.2),
    "gc_1": (None, 77.3),
    "gc_all": (39.4, 77.7),
    "gc_r4": (39.9, None),
    "eca": (39.0, 77.5),
    "dia": (None, 77.2),
    "rla_g": (39.5, 77.2),
    "ba": (40.5, 77.8),
    "dla_light": (None, None),
    "kcla": (None, None),
    "mla": (None, None),
    "dwconv alone": (None, None),
    "mrla_base": (40.9, 77.7),
    "mrla_light": (41.2, 77.7),
}


def build(name: str, norm: str) -> nn.Module:
    """Build the backbone of a row, with frozen or with batch statistics."""
    cfg = dict(type="mmdet.ResNet" if name == "plain" else "ComparatorResNet", depth=50)
    if not name.startswith("plain"):
        config = f"imagenet/resnet50_{name}_8xb32"
        if name == "dwconv alone":
            config = "imagenet/resnet50_mrla_light_8xb32"
        if name == "gc_r4":
            config = "comparators/mask_rcnn_r50_gc_r4_1x"
        cfg = dict(read_config(f"mrla_mm::{config}.py", {}).model.backbone)
        for key in ("init_cfg", "out_hidden", "attention_drop_path"):
            cfg.pop(key, None)
    if name == "dwconv alone":
        cfg["layer_attention"] = dict(type="MRLALight", gated=False, previous="none")
    cfg |= dict(norm_eval=norm == "frozen", frozen_stages=-1)
    cfg |= dict(out_indices=(0, 1, 2, 3), zero_init_residual=False)
    return randomize_zero_init(MODELS.build(cfg))


def comparators(args):
    """Time and memory of a step with each attention module over plain, and their plot."""
    rows = {}
    for name, (ap, top) in PAPER.items():
        rows[name] = {"model": name, "AP": ap or "", "Top-1": top or ""}
    os.environ.pop("MRLA_OPS", None)
    for norm in ("frozen", "batch"):
        steps = {name: Step(build(name, norm), args) for name in PAPER}
        options = dict(device=args.device, clock=args.clock, title=f"{norm} statistics")
        seconds = measure.time_rounds(steps, args.rounds, **options)
        for name, step in steps.items():
            ratios = measure.ratios(seconds[name], seconds["plain"])
            rows[name][f"{norm}: time"] = statistics.median(ratios)
            rows[name][f"{norm}: +-"] = measure.spread(ratios)
            rows[name][f"{norm}: memory"] = step.memory() / max(steps["plain"].memory(), 1)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "comparators.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows["plain"])
        for row in rows.values():
            writer.writerow(measure.show(cell) for cell in row.values())
    title = "Comparators on ResNet-50: the paper's AP and Top-1, and cost relative to plain"
    return {title: [*rows.values()]}
