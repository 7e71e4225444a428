"""Plots of a training run from the scalars that mmengine logs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mrla_mm.analysis.logs import read_scalars

AP_LABELS = {"bbox_mAP": "box AP", "bbox_mAP_50": "box AP50", "segm_mAP": "mask AP", "segm_mAP_50": "mask AP50"}
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def plot_training_curves(json_logs: Sequence[str | Path], out_file: str | Path) -> Path:
    """Draw loss terms, learning rate and validation AP of a run.

    Args:
        json_logs: mmengine's scalars.json files of the run, oldest first.
        out_file: Picture to write; its folder is made.

    Returns:
        Path: `out_file`.

    Raises:
        InputError: From `read_scalars`.
    """
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    draw_training_curves(*read_scalars(json_logs)).savefig(out_file, dpi=120)
    return out_file


def draw_training_curves(train: list[dict], val: list[dict]) -> Figure:
    """Draw loss terms, learning rate and validation AP from the records of `read_scalars`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        losses, rate, precision = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1.2])
        _plot_losses(losses, train)
        rate.plot([r["step"] for r in train], [r.get("lr", np.nan) for r in train], color="tab:gray")
        rate.set(title="learning rate", xlabel="iteration", ylim=(0, None))
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        _plot_precision(precision, val)
    return figure


def draw_runs(runs: Mapping[str, tuple[list[dict], list[dict]]]) -> Figure:
    """Draw the training loss and the validation AP of several runs on the same axes.

    Args:
        runs: records of `read_scalars` by the name of the run.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        losses, boxes, masks = figure.subplots(1, 3)
        for index, (name, (train, _)) in enumerate(runs.items()):
            steps, values = [r["step"] for r in train], [r["loss"] for r in train]
            losses.plot(steps, values, color=f"C{index % 10}", linewidth=1.3, label=name)
        losses.set(title="training loss (sum)", xlabel="iteration", yscale="log")
        for axes, metric in ((boxes, "bbox_mAP"), (masks, "segm_mAP")):
            _plot_metric(axes, runs, metric)
        for axes in (losses, boxes, masks):
            axes.grid(alpha=0.3)
        losses.legend(fontsize=8, frameon=False)
    return figure


def _plot_metric(axes, runs: Mapping[str, tuple[list[dict], list[dict]]], metric: str) -> None:
    axes.set(title=f"validation, {AP_LABELS[metric]}", xlabel="epoch")
    for index, (_, val) in enumerate(runs.values()):
        points = [(r["step"], r[f"coco/{metric}"]) for r in val if f"coco/{metric}" in r]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{index % 10}", markersize=4)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if not axes.lines:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def _plot_losses(axes, train: list[dict]) -> None:
    steps = [r["step"] for r in train]
    terms = sorted({key for r in train for key in r if key.startswith("loss_")})
    for term in terms:
        axes.plot(steps, [r.get(term, np.nan) for r in train], linewidth=1, alpha=0.8, label=term)
    total = np.array([r["loss"] for r in train], float)
    axes.plot(steps, total, color="black", linewidth=1.8, label="loss (sum)")
    axes.set(title="training loss", xlabel="iteration", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def _plot_precision(axes, val: list[dict]) -> None:
    axes.set(title="validation", xlabel="epoch", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    for metric, label in AP_LABELS.items():
        points = [(r["step"], r[f"coco/{metric}"]) for r in val if f"coco/{metric}" in r]
        if not points:
            continue
        kind, threshold = metric.split("_")[0], metric.endswith("50")
        colour = {"bbox": "tab:blue", "segm": "tab:orange"}[kind]
        axes.plot(*zip(*points, strict=True), "o-" if threshold else "o--", color=colour, markersize=4, label=label)
        axes.annotate(f"{points[-1][1]:.2f}", points[-1], xytext=(4, 4), textcoords="offset points", color=colour)
    if axes.lines:
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "no validation yet", ha="center", transform=axes.transAxes)
