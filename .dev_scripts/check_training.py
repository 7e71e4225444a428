#!/usr/bin/env python
"""Train several configs for a few hundred iterations in each precision, and print what they cost.

`python .dev_scripts/check_training.py --data-root data/coco` trains the three R50 light configs and one base config at
full size from scratch. Each row says whether the loss fell and stayed finite, images per second and peak memory; the
rows also go to OUT/report.json and OUT/report.md.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from mmengine.device import get_device

import measure
from mrla_mm import cli
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIGS = (
    "retinanet_r50_mrla_light_1x",
    "faster_rcnn_r50_mrla_light_1x",
    "mask_rcnn_r50_mrla_light_1x",
    "retinanet_r50_mrla_base_1x",
)
# Arguments of tools/train.py. fp16 needs a GPU; in bf16 many a CPU takes minutes per step.
PRECISIONS = {"fp32": [], "fp16": ["--amp"], "bf16": ["--cfg-options", "optim_wrapper.type=BFloat16OptimWrapper"]}

# From scratch nothing may stay frozen, and batch statistics are needed.
OVERRIDES = """_base_ = {base!r}
model = dict(backbone=dict(init_cfg=None, frozen_stages=-1, norm_eval=False))
train_cfg = dict(_delete_=True, type="IterBasedTrainLoop", max_iters={iters}, val_interval={iters} + 1)
train_dataloader = dict(batch_size={batch}, sampler=dict(_delete_=True, type="InfiniteSampler"))
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(by_epoch=False, interval={iters}, max_keep_ckpts=1))
log_processor = dict(by_epoch=False)
val_dataloader = None
val_evaluator = None
val_cfg = None
"""


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="check_training.py", description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", default=DEFAULT_CONFIGS, help="names in configs/, without .py")
    parser.add_argument("--data-root", default="data/coco", help="folder in COCO's layout")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/check_training"))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: fp32, and on a GPU all")
    parser.add_argument("--cfg-options", nargs="*", default=[], metavar="KEY=VALUE", help="passed on to train.py")
    return parser.parse_args(argv)


def train(name, precision, args):
    """Train one config in a separate process; return its row."""
    work_dir = args.out / f"{name}_{precision}"
    work_dir.mkdir(parents=True, exist_ok=True)
    config = work_dir / "config.py"
    base = str((ROOT / "configs" / f"{name}.py").resolve())
    config.write_text(OVERRIDES.format(base=base, iters=args.iters, batch=args.batch_size), encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools/train.py"), str(config), "--work-dir", str(work_dir)]
    command += [*PRECISIONS[precision], "--cfg-options", f"data_root={args.data_root}", *args.cfg_options]
    with open(work_dir / "console.log", "w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    return dict(config=name, precision=precision, exit=code, **summarise(work_dir, args.batch_size))


def summarise(work_dir, batch_size):
    """Return what the newest log says: losses of the first and last tenth, speed without warm-up, memory."""
    logs = sorted(work_dir.glob("*/vis_data/scalars.json"))
    lines = [json.loads(line) for line in logs[-1].read_text().splitlines()] if logs else []
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return {}
    tenth = max(1, len(steps) // 10)
    first, last = (statistics.mean(s["loss"] for s in part) for part in (steps[:tenth], steps[-tenth:]))
    settled = steps[len(steps) // 2 :]
    return {
        "first loss": round(first, 4),
        "last loss": round(last, 4),
        "finite": all(math.isfinite(s["loss"]) for s in steps),
        "fell": last < first,
        "images/s": round(batch_size / statistics.median(s["time"] for s in settled), 2),
        "peak MiB": max((s.get("memory", 0) for s in steps), default=0) or None,
    }


def main(argv=None):
    """Run every config in every precision.

    Raises:
        InputError: a run did not finish with a finite loss that fell.
    """
    args = parse_args(argv)
    precisions = args.precisions or (list(PRECISIONS) if torch.cuda.is_available() else ["fp32"])
    machine = measure.describe_machine(torch.device(get_device()), iters=args.iters, batch_size=args.batch_size)
    rows = []
    for name in args.configs:
        for precision in precisions:
            print(f"training {name} in {precision}, {args.iters} iterations ...", flush=True)
            rows.append(train(name, precision, args))
            print("   ", rows[-1], flush=True)
            markdown = measure.write_report(args.out, machine, {"Training": rows})
    print(markdown)
    failed = [row for row in rows if not (row.get("finite") and row.get("fell") and row["exit"] == 0)]
    if failed:
        names = ", ".join(f"{row['config']} in {row['precision']}" for row in failed)
        raise InputError(f"no finite, falling loss: {names}; {args.out}/<config>_<precision>/console.log says why")


if __name__ == "__main__":
    sys.exit(cli.run(main))
