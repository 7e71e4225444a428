"""The pictures of a report: precision-recall curves, error breakdown and confusion matrix."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from pycocotools.cocoeval import COCOeval

from mrla_mm.analysis.error_breakdown import KINDS, ErrorBreakdown

MANY_CLASSES = 12  # more have no room for a curve, a name and a number each
SHOWN_CLASSES = 10
TITLES = {"bbox": "boxes", "segm": "masks"}


def plot_precision_recall(evaluations: Mapping[str, COCOeval], classes: Sequence[str]) -> Figure:
    """Draw precision against recall: the mean over classes by IoU, and single classes at an IoU of 0.5.

    Of many classes ten are drawn, spread evenly from the best to the worst.
    """
    figure = Figure(figsize=(10.5, 3.9 * len(evaluations)), layout="constrained")
    grid = figure.subplots(len(evaluations), 2, squeeze=False)
    for row, (kind, evaluation) in enumerate(evaluations.items()):
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (T, R, K)
        recalls = evaluation.params.recThrs
        known = np.flatnonzero((precision > -1).all((0, 1)))
        draw_thresholds(grid[row, 0], recalls, precision[:, :, known], evaluation.params.iouThrs)
        draw_classes(grid[row, 1], recalls, precision[0][:, known], [classes[index] for index in known])
        grid[row, 0].set_title(f"{TITLES[kind]}: mean over classes", fontsize=10)
        many = f" ({SHOWN_CLASSES} of {len(known)}, best to worst)" if len(known) > MANY_CLASSES else ""
        grid[row, 1].set_title(f"{TITLES[kind]}: classes at IoU 0.50{many}", fontsize=10)
        for axes in grid[row]:
            axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def draw_thresholds(axes, recalls: np.ndarray, precision: np.ndarray, thresholds: np.ndarray) -> None:
    """Draw a curve for each IoU, averaged over the classes of precision (T, R, K)."""
    if precision.shape[-1] == 0:
        return
    palette = matplotlib.colormaps["viridis_r"]
    for index, threshold in enumerate(thresholds):
        curve = precision[index].mean(-1)
        colour = palette(0.15 + 0.85 * index / max(1, len(thresholds) - 1))
        axes.plot(recalls, curve, color=colour, linewidth=1.5, label=f"{threshold:.2f}: {curve.mean():.3f}")


def draw_classes(axes, recalls: np.ndarray, precision: np.ndarray, names: Sequence[str]) -> None:
    """Draw a curve for each class of precision (R, K), best first, or for some of many."""
    order = np.argsort(-precision.mean(0), kind="mergesort")
    if len(order) > MANY_CLASSES:
        order = order[np.linspace(0, len(order) - 1, SHOWN_CLASSES).round().astype(int)]
    for rank, index in enumerate(order):
        style, label = "-" if rank < 10 else "--", f"{names[index]}: {precision[:, index].mean():.3f}"
        axes.plot(recalls, precision[:, index], style, color=f"C{rank % 10}", linewidth=1.3, label=label)


def plot_errors(found: Mapping[str, ErrorBreakdown]) -> Figure:
    """Draw how much AP50 each kind of error costs, a panel for boxes and one for masks."""
    figure = Figure(figsize=(5.2 * len(found), 2.9), layout="constrained")
    grid = figure.subplots(1, len(found), squeeze=False, sharex=True)
    names = [*KINDS, "all wrong detections", "all undetected objects"]
    colours = [*(f"C{index}" for index in range(len(KINDS))), "0.6", "0.6"]
    for axes, (kind, errors) in zip(grid.flat, found.items(), strict=True):
        gains = [*(errors.gains[name] for name in KINDS), errors.gain_false_positives, errors.gain_false_negatives]
        bars = axes.barh(names[::-1], gains[::-1], color=colours[::-1])
        axes.bar_label(bars, [f"{gain:.3f}" for gain in gains[::-1]], padding=3, fontsize=8)
        axes.set_title(f"{TITLES[kind]}: AP50 {errors.ap50:.3f}, and what mending would add", fontsize=9)
        axes.set_xlim(min(0, *gains) * 1.2, max(0.02, *gains) * 1.25)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_confusion(counts: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw the share of each class's objects that was taken for each class; numbers where there is room."""
    names = [*classes, "background"]
    few = len(classes) <= MANY_CLASSES
    side = 0.62 * len(names) + 2.4 if few else 11.5
    figure = Figure(figsize=(side + 1, side * 0.86), layout="constrained")
    axes = figure.subplots()
    totals = counts.sum(1, keepdims=True)
    share = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    norm = None if few else LogNorm(0.01, 1, clip=True)  # among 80 classes the rare confusions are what matters
    image = axes.imshow(share, cmap="Blues", norm=norm, **(dict(vmin=0, vmax=1) if few else {}))
    size = 9 if few else max(4, 8 - len(names) // 25)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set(xlabel="predicted (background: not detected)", ylabel="truth (background: no object there)")
    if few:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, counts[row, column], ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, label="share of the row")
    return figure
