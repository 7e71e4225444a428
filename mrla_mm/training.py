"""Training from a config, new or continued: what tools/train.py and comparisons share."""

from collections.abc import Iterable
from pathlib import Path

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import find_latest_checkpoint

from mrla_mm import cli


def last_checkpoint(work_dir: str | Path) -> str | None:
    """Return the checkpoint to resume from, None if there is none.

    mmengine records its path, which in a copied work directory is that of the original.
    """
    recorded = find_latest_checkpoint(work_dir)
    if recorded is None:
        return None
    own = Path(work_dir, Path(recorded).name)
    return str(own) if own.is_file() else recorded


def resume_from(cfg: Config, checkpoint: str | None) -> None:
    """Let the training continue from a checkpoint; without one it starts as the config says."""
    cfg.resume = checkpoint is not None
    if cfg.resume:
        cfg.load_from = checkpoint


def train(cfg: Config, hooks: Iterable[Hook] = ()) -> None:
    """Train the model of a config, with further hooks."""
    if cfg.get("resume") and not cfg.get("load_from"):  # mmengine would start without weights
        resume_from(cfg, last_checkpoint(cfg.work_dir))
    runner = cli.build_runner(cfg, "train", "val")
    for hook in hooks:
        runner.register_hook(hook)
    if cfg.get("resume"):
        runner.logger.info(f"--resume: continuing from {cfg.load_from}")
        # The checkpoint has all weights; those that the run started from may be gone.
        for module in runner.model.modules():
            if hasattr(module, "init_cfg"):
                module.init_cfg = None
    runner.train()
