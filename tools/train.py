#!/usr/bin/env python
"""Train the model of a config: `python tools/train.py configs/retinanet_r50_mrla_light_1x.py`."""

import argparse
import sys
import zipfile
from pathlib import Path

from mmengine import device
from torch import nn

from mrla_mm import cli
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the model of a config.")
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("--amp", action="store_true", help="train in mixed precision (GPU only)")
    parser.add_argument(
        "--auto-scale-lr",
        action="store_true",
        help="scale the learning rate to the total batch size",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="continue from this checkpoint, or from the newest in the work directory",
    )
    cli.add_run_arguments(parser)
    return parser.parse_args(argv)


def newest_checkpoint(work_dir):
    """Return the checkpoint to resume from, None if no file is intact.

    The best checkpoints are left out, since mmengine saves them without the optimizer.
    `last_checkpoint` holds a path that a copied work directory no longer has, so the file of that
    name in the directory comes first.
    """
    found = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    record = work_dir / "last_checkpoint"
    if record.is_file():
        recorded = record.read_text(errors="replace").strip()
        if "://" in recorded:
            return recorded
        found = [work_dir / Path(recorded).name, Path(recorded), *found]
    return next((path for path in found if path.is_file() and zipfile.is_zipfile(path)), None)


def main(argv=None, hooks=()):
    """Train with the given command line, and hooks of a caller in Python."""
    args = parse_args(argv)
    cfg = cli.load_config(args)
    if args.amp and device.get_device() == "cpu":
        option = "--cfg-options optim_wrapper.type=BFloat16OptimWrapper"
        raise InputError(f"--amp needs a GPU; for bfloat16 on a CPU: {option}")
    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    if args.auto_scale_lr:
        if "base_batch_size" not in cfg.get("auto_scale_lr", {}):
            raise InputError("--auto-scale-lr: the config has no auto_scale_lr.base_batch_size")
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        checkpoint = newest_checkpoint(Path(cfg.work_dir)) if args.resume == "auto" else args.resume
        cfg.resume = checkpoint is not None
        if cfg.resume:
            cfg.load_from = str(checkpoint)
    runner = cli.build_runner(cfg, "train", "val")
    for hook in hooks:
        runner.register_hook(hook)
    if cfg.resume and isinstance(runner.model, nn.Module):
        # The checkpoint has all weights; those that the run started from may be gone.
        for module in runner.model.modules():
            if hasattr(module, "init_cfg"):
                module.init_cfg = None
    if args.resume is not None:
        scratch = "no checkpoint yet, training starts from scratch"
        found = f"continuing from {cfg.load_from}" if cfg.resume else scratch
        runner.logger.info(f"--resume: {found}")
    try:
        runner.train()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"--resume continues from the last checkpoint in {cfg.work_dir}"
        ) from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
