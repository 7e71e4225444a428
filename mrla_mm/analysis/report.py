"""The report of a training run: one page of HTML with what it did, what it finds and what it gets wrong."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData

from mrla_mm.analysis import html_page as html
from mrla_mm.analysis import report_plots
from mrla_mm.analysis.coco_results import SIZES, DetectionSet, class_figures, evaluate, size_counts, summary
from mrla_mm.analysis.confusion import confused_pairs, confusion_matrix
from mrla_mm.analysis.error_breakdown import BACKGROUND, FOREGROUND, KINDS, error_breakdown
from mrla_mm.analysis.gallery import compare
from mrla_mm.analysis.plots import AP_LABELS, draw_runs, draw_training_curves

MAX_EPOCH_ROWS = 60
GALLERY_WIDTH = 960
SHORT = {"bbox": "box", "segm": "mask"}
MEANING = {
    "classification": "well placed, on an object of another class",
    "localisation": f"on an object of its class, but with an IoU of only {BACKGROUND} to {FOREGROUND}",
    "both": "badly placed, on an object of another class",
    "duplicate": "on an object of its class that a better-scoring detection has",
    "background": f"where there is no object (IoU below {BACKGROUND})",
    "missed": "objects without a detection, and without one that is only badly placed or of another class",
}


def training_sections(facts: Mapping[str, str], config_text: str, train: list[dict], val: list[dict]) -> list:
    """Return run facts, curves and AP by epoch."""
    config = html.details("the whole config", f"<pre>{escape(config_text)}</pre>")
    curves = html.figure_html(draw_training_curves(train, val), "losses, learning rate and validation")
    return [
        ("Run", html.facts_table(facts) + config),
        ("Training curves", curves),
        ("AP by epoch", html.table(epoch_rows(val), best=metric_columns(val))),
    ]


def epoch_rows(val: list[dict]) -> list[dict]:
    """Return the metrics of each validation; of very many, evenly spread ones and the last."""
    metrics = metric_columns(val)
    step = -(-len(val) // MAX_EPOCH_ROWS) if val else 1
    kept = val[::-1][::step][::-1]
    return [
        {"epoch": record["step"]} | {name: float(record.get(f"coco/{key}", np.nan)) for name, key in metrics.items()}
        for record in kept
    ]


def metric_columns(val: list[dict]) -> dict[str, str]:
    """Return the metrics that validations have, by their name in the table."""
    keys = dict.fromkeys(key.removeprefix("coco/") for record in val for key in record if key.startswith("coco/"))
    return {metric_name(key): key for key in keys if not key.endswith("_copypaste")}


def metric_name(key: str) -> str:
    """Return how a metric of mmdet is called in a table: bbox_mAP_s is "box AP small"."""
    kind, _, rest = key.partition("_mAP")
    size = {f"_{name[0]}": f" {name}" for name in SIZES}.get(rest, rest.replace("_", ""))
    return f"{SHORT[kind]} AP{size}" if kind in SHORT else key


def comparison_section(runs: Mapping[str, tuple[list[dict], list[dict]]]) -> tuple[str, str]:
    """Return the curves of several runs on the same axes, and where they end."""
    rows = []
    for name, (train, val) in runs.items():
        row = {"run": name, "iterations": train[-1]["step"], "loss at the end": float(train[-1]["loss"])}
        for metric in ("bbox_mAP", "bbox_mAP_50", "segm_mAP"):
            values = [float(record[f"coco/{metric}"]) for record in val if f"coco/{metric}" in record]
            row[f"{AP_LABELS[metric]}, last"] = values[-1] if values else float("nan")
            row[f"{AP_LABELS[metric]}, best"] = max(values, default=float("nan"))
        rows.append(row)
    return "Runs compared", html.figure_html(draw_runs(runs), "curves of all runs") + html.table(rows)


def detection_sections(found: DetectionSet, images: Mapping[int, Path], meta: dict, *, limit: int, score_thr: float):
    """Return what a detector finds and gets wrong.

    Args:
        found: ground truth and detections.
        images: file of each image.
        meta: "classes" and "palette" of the data set.
        limit: pictures in the gallery.
        score_thr: detections below it are left out of gallery and confusion matrix.
    """
    evaluations = {kind: evaluate(found, kind) for kind in found.results}
    return [
        ("Ground truth beside predictions", gallery(found, images, meta, limit=limit, score_thr=score_thr)),
        ("AP and recall by size", size_section(found, evaluations)),
        ("Classes", class_section(found, evaluations)),
        ("Errors", error_section(found)),
        ("Precision and recall", recall_section(found, evaluations)),
        ("Confusion matrix", confusion_section(found, score_thr)),
    ]


def gallery(found: DetectionSet, images: Mapping[int, Path], meta: dict, *, limit: int, score_thr: float) -> str:
    """Return images spread evenly over the data set, ground truth on the left, predictions on the right."""
    there = [image_id for image_id in found.image_ids if image_id in images and Path(images[image_id]).is_file()]
    if not there:
        return "<p>The images of the data set are not where the config says.</p>"
    chosen = sorted({round(index) for index in np.linspace(0, len(there) - 1, min(limit, len(there)))})
    by_image: dict[int, list[dict]] = {there[index]: [] for index in chosen}
    for one in found.results.get("segm", found.results["bbox"]):
        if one["image_id"] in by_image:
            by_image[one["image_id"]].append(one)
    parts, faults = [], []
    for image_id, detections in by_image.items():
        image = read_image(images[image_id])
        annotated = found.truth.imgs[image_id]
        if image is None or image.shape[:2] != (annotated["height"], annotated["width"]):
            what = "is no image that can be read" if image is None else "has another size than its annotations say"
            faults.append(f"<p>{escape(str(images[image_id]))} {what}.</p>")
            continue
        truth = [one for one in found.truth.imgToAnns[image_id] if not one.get("iscrowd", 0)]
        sample = DetDataSample(
            gt_instances=as_instances(truth, found, image.shape[:2]),
            pred_instances=as_instances(detections, found, image.shape[:2]),
        )
        picture = compare(image, sample, meta=meta, score_thr=score_thr)
        parts.append(html.picture_html(picture, Path(images[image_id]).name, width=GALLERY_WIDTH))
    note = f"<p>{len(parts)} of {len(found.image_ids)} images, predictions that score at least {score_thr}.</p>"
    return f'{note}{"".join(faults)}<div class="gallery">{"".join(parts)}</div>'


def read_image(path: Path) -> np.ndarray | None:
    """Return an image (H, W, 3) in RGB, None for a file that is no image."""
    try:
        return mmcv.imread(str(path), channel_order="rgb")
    except (cv2.error, OSError):
        return None


def as_instances(records: Sequence[dict], found: DetectionSet, size: tuple[int, int]) -> InstanceData:
    """Return annotations or results in an image of a size (height, width) as mmdet draws them."""
    label = {category: index for index, category in enumerate(found.category_ids)}
    records = [one for one in records if one["category_id"] in label]
    boxes = np.array([one["bbox"] for one in records], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes = boxes.clip(0, [size[1], size[0], size[1], size[0]]).astype(
        np.float32
    )  # the canvas grows with what is beyond
    instances = InstanceData(
        bboxes=torch.from_numpy(boxes), labels=torch.tensor([label[one["category_id"]] for one in records]).long()
    )
    if records and "score" in records[0]:
        instances.scores = torch.tensor([one["score"] for one in records])
    if records and "segm" in found.results and all(one.get("segmentation") for one in records):
        masks = [found.truth.annToMask(one) for one in records]
        instances.masks = torch.from_numpy(np.stack(masks).astype(bool))
    return instances


def size_section(found: DetectionSet, evaluations: Mapping) -> str:
    """Return AP and AR, by size too."""
    rows = [{"": SHORT[kind], **summary(evaluation)} for kind, evaluation in evaluations.items()]
    counts = ", ".join(f"{count:,} {size}" for size, count in size_counts(found).items())
    return (
        f"<p>{len(found.image_ids):,} images with {counts} objects (areas below 32², below 96² and above, in pixels); "
        f"at most 100 detections an image and class.</p>{html.table(rows)}"
    )


def class_section(found: DetectionSet, evaluations: Mapping) -> str:
    """Return the figures of each class, best first."""
    parts = []
    for kind, evaluation in evaluations.items():
        rows = sorted(class_figures(evaluation, found), key=lambda row: -row["AP"] if row["AP"] == row["AP"] else 1)
        parts.append(f"<h3>{SHORT[kind]} AP</h3>{html.table(rows, bar='AP')}")
    return "".join(parts)


def error_section(found: DetectionSet) -> str:
    """Return how many errors of each kind there are and what they cost."""
    breakdowns = {kind: error_breakdown(found, kind) for kind in found.results}
    rows = []
    for name in KINDS:
        row = {"error": name}
        for kind, errors in breakdowns.items():
            row |= {f"number, {SHORT[kind]}": errors.counts[name], f"dAP50, {SHORT[kind]}": errors.gains[name]}
        rows.append(row | {"meaning": MEANING[name]})
    text = (
        "<p>Every wrong detection is sorted by what is wrong with it, after TIDE (Bolya et al., 2020). dAP50 is what "
        "AP50 would gain if an oracle mended the errors of this kind alone: moved the box, exchanged the class (the "
        "best detection of an object stays), removed the detection, or did not ask for the missed object. Gains do not "
        "add up to 1 - AP50, because errors hide each other.</p>"
    )
    return (
        text
        + html.figure_html(report_plots.plot_errors(breakdowns), "AP50 that each kind of error costs")
        + html.table(rows)
    )


def recall_section(found: DetectionSet, evaluations: Mapping) -> str:
    """Return precision-recall curves."""
    figure = report_plots.plot_precision_recall(evaluations, found.classes)
    return html.figure_html(figure, "precision against recall; the legend gives the mean precision of a curve, its AP")


def confusion_section(found: DetectionSet, score_thr: float) -> str:
    """Return the confusion matrix and the most frequent confusions."""
    counts = confusion_matrix(found, score_thr=score_thr)
    pairs = [
        {"truth": truth, "predicted": predicted, "times": times}
        for truth, predicted, times in confused_pairs(counts, found.classes)
    ]
    text = f"<p>Boxes that score at least {score_thr}, matched to objects at an IoU of {FOREGROUND} or more.</p>"
    plot = report_plots.plot_confusion(counts, found.classes)
    figure = html.figure_html(plot, "which class was taken for which", dpi=140)
    return text + figure + "<h3>Most frequent confusions</h3>" + html.table(pairs)
