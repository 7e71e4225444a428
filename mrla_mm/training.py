"""Training from a config, new or continued: what tools/train.py and comparisons share."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

from mmengine.config import Config
from mmengine.hooks import Hook
from torch import nn

from mrla_mm import cli


def newest_checkpoint(work_dir: str | Path) -> str | Path | None:
    """Return the checkpoint to resume from, None if no file is intact.

    The best checkpoints are left out, since mmengine saves them without the optimizer.
    `last_checkpoint` holds a path that a copied work directory no longer has, so the file of that
    name in the directory comes first.
    """
    work_dir = Path(work_dir)
    found = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    record = work_dir / "last_checkpoint"
    if record.is_file():
        recorded = record.read_text(errors="replace").strip()
        if "://" in recorded:
            return recorded
        found = [work_dir / Path(recorded).name, Path(recorded), *found]
    return next((path for path in found if path.is_file() and zipfile.is_zipfile(path)), None)


def resume_from(cfg: Config, checkpoint: str | Path | None) -> None:
    """Let the training continue from a checkpoint; without one it starts as the config says."""
    cfg.resume = checkpoint is not None
    if cfg.resume:
        cfg.load_from = str(checkpoint)


def train(cfg: Config, hooks: Iterable[Hook] = ()) -> None:
    """Train the model of a config, with further hooks."""
    if cfg.get("resume") and not cfg.get("load_from"):  # mmengine would start without weights
        resume_from(cfg, newest_checkpoint(cfg.work_dir))
    runner = cli.build_runner(cfg, "train", "val")
    for hook in hooks:
        runner.register_hook(hook)
    if cfg.get("resume"):
        runner.logger.info(f"--resume: continuing from {cfg.load_from}")
        if isinstance(runner.model, nn.Module):
            # The checkpoint has all weights; those that the run started from may be gone.
            for module in runner.model.modules():
                if hasattr(module, "init_cfg"):
                    module.init_cfg = None
    runner.train()
