"""What a work directory of a training run holds."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config
from torch import Tensor

from mrla_mm.analysis.logs import training_logs
from mrla_mm.errors import InputError

ENVIRONMENT = ("Python", "PyTorch", "TorchVision", "MMEngine", "CUDA available", "GPU 0", "GPU number", "seed")


class Run(NamedTuple):
    """A training run.

    Attributes:
        folder: where its files are.
        config: the config it trained with, None where there is none.
        checkpoint: its best checkpoint, or else its last, None where there is none.
        logs: scalar logs, oldest first.
    """

    folder: Path
    config: Path | None
    checkpoint: Path | None
    logs: list[Path]

    @property
    def name(self) -> str:
        """Name of the folder that the user gave, which for the quick start holds the run in `train`."""
        return self.folder.parent.name if self.folder.name == "train" else self.folder.name


def find_run(folder: str | Path) -> Run:
    """Find config, checkpoint and logs of a run, in the folder or, as the quick start leaves them, in its `train`.

    Raises:
        InputError: the folder is missing or holds no run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"work directory {folder} does not exist: give one that tools/train.py wrote")
    for place in (folder, folder / "train"):
        logs = training_logs(place)
        if logs:
            return Run(place, find_config(place, logs), find_checkpoint(place), logs)
    raise InputError(f"work directory {folder} holds no training log (*/vis_data/scalars.json)")


def find_config(folder: Path, logs: list[Path]) -> Path | None:
    """Return the config that mmengine wrote into a work directory, or None."""
    candidates = [*folder.glob("*.py"), *(log.with_name("config.py") for log in logs)]
    candidates = [path for path in candidates if path.is_file()]
    return max(candidates, key=lambda path: (path.parent == folder, path.stat().st_mtime), default=None)


def find_checkpoint(folder: Path) -> Path | None:
    """Return the best checkpoint by validation, or else the last one, or None."""
    for pattern in ("best_*.pth", "epoch_*.pth", "iter_*.pth"):
        found = list(folder.glob(pattern))
        if found:
            return max(found, key=lambda path: (trained_steps(path), path.stat().st_mtime))
    return None


def trained_steps(path: Path) -> int:
    """Number of epochs or iterations in a checkpoint's name."""
    numbers = re.findall(r"(?:epoch|iter)_(\d+)", path.stem)
    return int(numbers[-1]) if numbers else -1


def run_facts(run: Run, cfg: Config, train: Sequence[Mapping], val: Sequence[Mapping]) -> dict[str, str]:
    """Return what was trained, how and on what, as far as config and logs say.

    Args:
        run: where the files are.
        cfg: the config.
        train: records of training, from `read_scalars`.
        val: records of validation, from there too.
    """
    facts = {"config": Path(cfg.filename).name} | model_facts(cfg.get("model") or {})
    schedule = cfg.get("train_cfg") or {}
    planned = schedule.get("max_epochs")
    facts["epochs"] = f"{train[-1].get('epoch', '?')} of {planned}" if planned else "-"
    facts["last iteration in the log"] = f"{train[-1]['step']:,}"
    odd = [record["step"] for record in train if not math.isfinite(record["loss"])]
    if odd:
        facts["losses that are no number"] = f"{len(odd):,} of {len(train):,} in the log, first at iteration {odd[0]:,}"
    facts["batch size (one process)"] = str((cfg.get("train_dataloader") or {}).get("batch_size", "-"))
    optimizer = (cfg.get("optim_wrapper") or {}).get("optimizer", {})
    facts["optimizer"] = f"{optimizer.get('type', '-')}, lr {optimizer.get('lr', '-')}"
    times = sorted(record["time"] for record in train if isinstance(record.get("time"), float))
    if times:
        facts["time an iteration"] = f"{times[len(times) // 2]:.3f} s (median of the log)"
    memory = max((record.get("memory", 0) for record in train), default=0)
    if memory:
        facts["peak GPU memory"] = f"{memory:,} MB"
    measured = [record for record in val if record.get("coco/bbox_mAP", -1) >= 0]  # -1: no object; NaN is neither
    if measured:
        best = max(measured, key=lambda record: record["coco/bbox_mAP"])
        facts["best box AP in training"] = f"{best['coco/bbox_mAP']:.3f} (epoch {best['step']})"
    source = cfg.get("provenance") or {}
    if source:
        facts["mrla_mm"] = f"{source.get('version')}, commit {source.get('commit') or 'unknown'}"
    return facts


def model_facts(model: Mapping) -> dict[str, str]:
    """Return what the config of a model says about it and its backbone."""
    facts = {"model": str(model.get("type", "?"))}
    backbone = model.get("backbone") or {}
    if backbone:
        depth = backbone.get("depth", backbone.get("arch", ""))
        facts["backbone"] = f"{backbone.get('type')} {depth if not isinstance(depth, dict) else ''}".strip()
        attention = backbone.get("layer_attention")
        items = sorted((attention or {}).items(), key=lambda item: item[0] != "type")  # its name first
        facts["layer attention"] = ", ".join(str(v) if k == "type" else f"{k}={v}" for k, v in items) or "-"
    return facts


def checkpoint_facts(path: Path, meta: Mapping, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a checkpoint says about itself in its metadata, and the number of weights in its state dict."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    count = sum(value.numel() for name, value in state.items() if not name.endswith(statistics))
    facts = {"checkpoint": path.name, "weights in it": f"{count:,} (without statistics of batch norm)"}
    if "epoch" in meta:
        facts["checkpoint written after"] = f"epoch {meta['epoch']}, iteration {meta.get('iter', '?')}"
    if "time" in meta:
        facts["checkpoint written at"] = str(meta["time"])
    return facts


def environment(run: Run) -> dict[str, str]:
    """Return versions and devices that the text log of the last start states."""
    texts = sorted(run.logs[-1].parent.parent.glob("*.log"))
    if not texts:
        return {}
    with texts[0].open(encoding="utf-8", errors="replace") as file:
        head = "".join(line for _, line in zip(range(80), file, strict=False))
    found = dict(re.findall(r"^ {4}([\w ]+): (.+)$", head, re.MULTILINE))
    return {key: found[key] for key in ENVIRONMENT if key in found}
