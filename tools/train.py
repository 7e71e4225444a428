#!/usr/bin/env python
"""Train the model of a config: `python tools/train.py configs/retinanet_r50_mrla_light_1x.py`."""

import argparse
import sys
import zipfile
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported
from mrla_mm import cli
from mrla_mm.errors import InputError
from mrla_mm.weights import without_pretrained


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train the model of a config.")
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("--amp", action="store_true", help="train in mixed precision (GPU only)")
    parser.add_argument("--auto-scale-lr", action="store_true", help="scale the learning rate to the total batch size")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="continue from this checkpoint; without a value, or with 'auto', from the latest in the work directory",
    )
    cli.add_run_arguments(parser)
    return parser.parse_args(argv)


def enable_amp(cfg):
    """Switch the optimizer wrapper to mixed precision with dynamic loss scaling."""
    cfg.optim_wrapper.type = "AmpOptimWrapper"
    cfg.optim_wrapper.setdefault("loss_scale", "dynamic")


def enable_auto_scale_lr(cfg):
    """Scale the learning rate linearly from the batch size the config was written for to the one it runs with."""
    if "base_batch_size" not in cfg.get("auto_scale_lr", {}):
        raise InputError(
            "--auto-scale-lr: the config does not say for which batch size its learning rate is meant; "
            "add auto_scale_lr.base_batch_size=16 (or its value) to --cfg-options"
        )
    cfg.auto_scale_lr.enable = True


def set_resume(cfg, checkpoint):
    """Continue from `checkpoint`, or with 'auto' from the newest intact one; with none there, start from scratch."""
    if checkpoint != "auto":
        if "://" not in checkpoint and not Path(checkpoint).is_file():
            raise InputError(f"--resume: checkpoint {checkpoint} does not exist")
        cfg.resume, cfg.load_from = True, checkpoint
        return
    latest = latest_checkpoint(Path(cfg.work_dir))
    cfg.resume = latest is not None
    if latest is None:
        print(f"--resume: no checkpoint in {cfg.work_dir}, training starts from scratch", flush=True)
    else:
        print(f"--resume: continuing from {latest}", flush=True)
        cfg.load_from = str(latest)


def latest_checkpoint(work_dir):
    """Return the newest checkpoint that is complete: a run killed while it saves leaves a torn file behind.

    The best checkpoints are left out: mmengine saves them without what a run needs to continue. The record may hold
    the path that a copied work directory came from, so a file of that name in the work directory comes first.
    """
    found = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    candidates = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    record = work_dir / "last_checkpoint"
    if record.is_file():
        recorded = Path(record.read_text(errors="replace").strip())
        candidates = [work_dir / recorded.name, recorded, *candidates]
    for path in candidates:
        if path.is_file() and zipfile.is_zipfile(path):
            return path
    return None


def main(argv=None):
    """Train with the given command line."""
    args = parse_args(argv)
    cfg = cli.load_config(args)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.resume is not None:
        set_resume(cfg, args.resume)
        if cfg.resume:
            cfg.model = without_pretrained(cfg.model)
    warned = cli.preflight(cfg, phases=("train", "val"))
    cli.build_runner(cfg, warned).train()


if __name__ == "__main__":
    sys.exit(cli.run(main))
