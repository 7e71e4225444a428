"""Training from a config, new or continued: what tools/train.py and comparisons share."""

from collections.abc import Iterable

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import find_latest_checkpoint

from mrla_mm import cli


def resume_from(cfg: Config, checkpoint: str | None) -> None:
    """Let the training continue from a checkpoint; without one it starts as the config says."""
    cfg.resume = checkpoint is not None
    if cfg.resume:
        cfg.load_from = checkpoint


def train(cfg: Config, hooks: Iterable[Hook] = ()) -> None:
    """Train the model of a config, with further hooks."""
    if cfg.get("resume") and not cfg.get("load_from"):  # mmengine would start without weights
        resume_from(cfg, find_latest_checkpoint(cfg.work_dir))
    runner = cli.build_runner(cfg, "train", "val")
    for hook in hooks:
        runner.register_hook(hook)
    if cfg.get("resume"):
        # The checkpoint has all weights; those that the run started from may be gone.
        for module in runner.model.modules():
            if hasattr(module, "init_cfg"):
                module.init_cfg = None
    runner.train()
