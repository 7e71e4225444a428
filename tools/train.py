#!/usr/bin/env python
"""Train the model of a config: `python tools/train.py configs/retinanet_r50_mrla_light_1x.py`."""

import argparse
import os
import sys
import zipfile
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported
from mrla_mm import cli
from mrla_mm.errors import InputError
from mrla_mm.notices import log_new


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
    """Continue from `checkpoint`, or with 'auto' from the newest intact one; with none there, start from scratch.

    Returns what there is to say about it.
    """
    said = []
    if checkpoint != "auto":
        if "://" not in checkpoint and not Path(checkpoint).exists():
            raise InputError(f"--resume: checkpoint {checkpoint} does not exist")
        if Path(checkpoint).is_dir() and not is_complete(Path(checkpoint), processes(cfg)):
            raise InputError(f"--resume: folder {checkpoint} lacks the file of a process, or one is torn")
        cfg.resume, cfg.load_from = True, checkpoint
        return said
    latest, left_out = latest_checkpoint(Path(cfg.work_dir), processes(cfg))
    for path in left_out:
        fault = f"lacks files of {processes(cfg)} processes, or one is torn" if path.is_dir() else "is torn"
        said.append(f"--resume: {path} {fault}; left out")
    cfg.resume = latest is not None
    if latest is None:
        said.append(f"--resume: no checkpoint in {cfg.work_dir}, training starts from scratch")
    else:
        said.append(f"--resume: continuing from {latest}")
        cfg.load_from = str(latest)
    return said


def processes(cfg):
    """Return how many processes the launcher started."""
    variable = {"pytorch": "WORLD_SIZE", "slurm": "SLURM_NTASKS", "mpi": "OMPI_COMM_WORLD_SIZE"}.get(cfg.launcher, "")
    return int(os.environ.get(variable, 1))


def is_complete(path, processes):
    """Whether a checkpoint is there as a whole: a file or, of FSDP, a folder with a file of each process.

    Raises:
        InputError: more processes saved the folder than are there to continue.
    """
    if not path.is_dir():
        return path.is_file() and zipfile.is_zipfile(path)
    found = list(path.glob("rank*.pth"))
    if len(found) > processes:
        raise InputError(
            f"--resume: {path} is of {len(found)} processes, this run has {processes}: FSDP's parts fit as many as "
            "saved them; start as many, or train with state_dict_type=FULL_STATE_DICT, whose files any number can read"
        )
    files = [path / f"rank{rank}.pth" for rank in range(processes)]
    return all(file.is_file() and zipfile.is_zipfile(file) for file in files)


def latest_checkpoint(work_dir, processes):
    """Return the newest checkpoint that is complete or None, and newer ones that are not.

    A run killed while it saves leaves a torn file behind.

    The best checkpoints are left out: mmengine saves them without what a run needs to continue. The record may hold
    the path that a copied work directory came from, so a file of that name in the work directory comes first.
    """
    found = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    candidates = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    record = work_dir / "last_checkpoint"
    if record.is_file():
        recorded = Path(record.read_text(errors="replace").strip())
        candidates = [work_dir / recorded.name, recorded, *candidates]
    left_out = []
    for path in dict.fromkeys(candidates):
        if is_complete(path, processes):
            return path, left_out
        if path.exists():
            left_out.append(path)
    return None, left_out


def main(argv=None):
    """Train with the given command line."""
    args = parse_args(argv)
    cfg = cli.load_config(args)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    said = []
    if args.resume is not None:
        said = set_resume(cfg, args.resume)
    warned = cli.preflight(cfg, phases=("train", "val"))
    runner = cli.build_runner(cfg, warned)
    log_new(runner, said)  # here, where the config printed before does not push it off the screen
    try:
        runner.train()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"the same command with --resume continues from the last checkpoint in {cfg.work_dir}, if there is one; "
            "SIGTERM (kill) saves one first"
        ) from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
