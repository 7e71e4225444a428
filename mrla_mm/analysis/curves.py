"""Training curves from the scalars that mmengine logs during a run, one JSON object a line.

Each start or resumption of a run has a log of its own. What an earlier one logged beyond the point
where a later one began was computed again, and is left out, as are lines that a killed run left
torn.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mrla_mm.errors import InputError

METRICS = {  # label, colour and line
    "bbox_mAP": ("box AP", "C0o--"),
    "bbox_mAP_50": ("box AP50", "C0o-"),
    "segm_mAP": ("mask AP", "C1o--"),
    "segm_mAP_50": ("mask AP50", "C1o-"),
}


def training_logs(work_dir: str | Path) -> list[Path]:
    """Return the scalar logs in a work directory, oldest first."""
    return sorted(Path(work_dir).glob("*/vis_data/scalars.json"))


def read_scalars(json_logs: Sequence[str | Path]) -> tuple[list[dict], list[dict]]:
    """Return the training and validation records of a run, each sorted by step.

    Training records have a "loss" and are by iteration; validation records are by epoch.
    """
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for path in json_logs:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        records = [json.loads(line) for line in lines if line[:1] + line[-1:] == "{}"]
        steps = [record for record in records if "loss" in record]
        if steps:
            first = steps[0]["step"]
            epoch = steps[0].get("epoch", steps[0]["step"])
            train = {step: record for step, record in train.items() if step < first}
            val = {step: record for step, record in val.items() if step < epoch}
        train |= {record["step"]: record for record in steps}
        scores = [record for record in records if any(key.startswith("coco/") for key in record)]
        val |= {record["step"]: record for record in scores}
    if not train:
        raise InputError(f"no training record in {[str(path) for path in json_logs]}")
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]


def draw_training_curves(train: list[dict], val: list[dict]) -> Figure:
    """Draw loss terms, learning rate and validation AP from the records of `read_scalars`."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    losses, rate, precision = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1.2])
    steps = [record["step"] for record in train]
    for term in sorted({key for record in train for key in record if key.startswith("loss_")}):
        values = [record.get(term, np.nan) for record in train]
        losses.plot(steps, values, linewidth=1, alpha=0.8, label=term)
    total = [record["loss"] for record in train]
    losses.plot(steps, total, color="black", label="loss (sum)")
    losses.set(title="training loss", xlabel="iteration", yscale="log")
    rate.plot(steps, [record.get("lr", np.nan) for record in train], color="tab:gray")
    rate.set(title="learning rate", xlabel="iteration", ylim=(0, None))
    precision.set(title="validation", xlabel="epoch", ylim=(0, 1))
    precision.xaxis.get_major_locator().set_params(integer=True)
    for metric, (label, style) in METRICS.items():
        scores = {r["step"]: r[f"coco/{metric}"] for r in val if f"coco/{metric}" in r}
        if scores:
            precision.plot(scores.keys(), scores.values(), style, markersize=4, label=label)
            precision.legend()
    losses.legend(fontsize=8)
    return figure
