"""Runs of a config, trainings new or continued: what the tools and comparisons share."""

import math
import os
import re
import zipfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mrla_mm.atomic import lock_folder
from mrla_mm.datasets.checks import check_data
from mrla_mm.errors import InputError
from mrla_mm.version import __version__

DEFAULT_HOOKS = [
    dict(type="DatasetCheckHook"),
    dict(type="mmdet.CheckInvalidLossHook", interval=1),  # mmengine reads every loss anyway
]
REGULAR = re.compile(r"(epoch_\d+|iter_\d+|interrupted)\.pth")


def add_hook(cfg: Config, hook: dict) -> None:
    """Add a hook to a config that has none of its type."""
    hooks = list(cfg.get("custom_hooks") or [])
    if class_name(hook) not in map(class_name, hooks):
        hooks.append(hook)
    cfg.custom_hooks = hooks


def class_name(hook: dict | Hook) -> str:
    """Return the name of a hook's class, without a scope."""
    kind = hook["type"] if isinstance(hook, dict) else type(hook)
    return getattr(kind, "__name__", kind).rpartition(".")[2]


def build_runner(cfg: Config, *phases: str) -> Runner:
    """Build the config's runner, on CPUs with gloo, and check data before mmdet reads them."""
    cfg.mrla_mm_version = __version__
    for hook in DEFAULT_HOOKS:
        add_hook(cfg, hook)
    if cfg.launcher == "pytorch" and not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo")
        wrapper = dict(type="MMDistributedDataParallel", broadcast_buffers=False)
        wrapper.update(find_unused_parameters=cfg.get("find_unused_parameters", False))
        wrapper.update(cfg.get("model_wrapper_cfg") or {}, device_ids=None)
        cfg.model_wrapper_cfg = wrapper
    runner = RUNNERS.build(cfg)
    check_data(runner, *phases)
    return runner


def last_checkpoint(work_dir: str | Path) -> str | None:
    """Return the checkpoint to resume from, None if there is none.

    mmengine records its path, which in a copied work directory is that of the original. If that is
    not there, as after a kill before the first is recorded, it is the newest file that is whole.
    """
    record = Path(work_dir, "last_checkpoint")
    recorded = record.read_bytes().decode(errors="ignore").strip() if record.is_file() else ""
    for path in (Path(work_dir, Path(recorded).name), Path(recorded)):
        if path.is_file():
            return str(path)
    paths = [path for path in Path(work_dir).glob("*.pth") if REGULAR.fullmatch(path.name)]
    whole = [path for path in paths if zipfile.is_zipfile(path)]  # a torn one has no directory
    return str(max(whole, key=os.path.getmtime)) if whole else recorded or None


def resume_from(cfg: Config, checkpoint: str | None) -> None:
    """Let the training continue from a checkpoint; without one it starts as the config says."""
    cfg.resume = checkpoint is not None
    if cfg.resume:
        cfg.load_from = checkpoint


def train(cfg: Config, hooks: Iterable[Hook] = ()) -> None:
    """Train the model of a config, with further hooks."""
    if cfg.get("resume") and not cfg.get("load_from"):  # mmengine would start without weights
        resume_from(cfg, last_checkpoint(cfg.work_dir))
    runner = build_runner(cfg, "train", "val")
    for hook in hooks:
        runner.register_hook(hook)
    if cfg.get("resume"):
        runner.logger.info(f"--resume: continuing from {cfg.load_from}")
        # The checkpoint has all weights; those that the run started from may be gone.
        for module in runner.model.modules():
            if hasattr(module, "init_cfg"):
                module.init_cfg = None
    with lock_folder(cfg.work_dir, "--work-dir") if is_main_process() else nullcontext():
        try:
            runner.train()
        except AssertionError as error:  # of CheckInvalidLossHook
            losses = runner.message_hub.log_scalars.get("train/loss")
            loss = losses.current() if losses else 0
            if math.isfinite(loss):  # of something else
                raise
            told = f"the loss is {loss} after iteration {runner.iter + 1}"
            remedy = "lower optim_wrapper.optimizer.lr, set optim_wrapper.clip_grad.max_norm=35"
            raise InputError(f"{told}: {remedy}, or leave out --amp") from error
