"""Training curves from the scalars that mmengine logs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mrla_mm.analysis.logs import read_scalars

METRICS = {  # name, line, colour
    "bbox_mAP": ("box AP", "o--", "tab:blue"),
    "bbox_mAP_50": ("box AP50", "o-", "tab:blue"),
    "segm_mAP": ("mask AP", "o--", "tab:orange"),
    "segm_mAP_50": ("mask AP50", "o-", "tab:orange"),
}


def plot_training_curves(json_logs: Sequence[str | Path], out_file: str | Path) -> Path:
    """Draw loss terms, learning rate and validation AP from a run's scalars.json files, oldest first."""
    Path(out_file).parent.mkdir(parents=True, exist_ok=True)
    draw_training_curves(*read_scalars(json_logs)).savefig(out_file, dpi=120)
    return Path(out_file)


def draw_training_curves(train: list[dict], val: list[dict]) -> Figure:
    """Draw loss terms, learning rate and validation AP from the records of `read_scalars`."""
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        losses, rate, precision = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1.2])
    steps = [record["step"] for record in train]
    for term in sorted({key for record in train for key in record if key.startswith("loss_")}):
        losses.plot(steps, [record.get(term, np.nan) for record in train], linewidth=1, alpha=0.8, label=term)
    losses.plot(steps, [record["loss"] for record in train], color="black", linewidth=1.8, label="loss (sum)")
    losses.set(title="training loss", xlabel="iteration", yscale="log")
    rate.plot(steps, [record.get("lr", np.nan) for record in train], color="tab:gray")
    rate.set(title="learning rate", xlabel="iteration", ylim=(0, None))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    precision.set(title="validation", xlabel="epoch", ylim=(0, 1))
    precision.xaxis.get_major_locator().set_params(integer=True)
    for metric, (label, style, colour) in METRICS.items():
        points = [(record["step"], record[f"coco/{metric}"]) for record in val if f"coco/{metric}" in record]
        if points:
            precision.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=label)
    if not precision.lines:
        precision.text(0.5, 0.5, "no validation yet", ha="center", transform=precision.transAxes)
    for axes in (losses, precision):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    return figure
