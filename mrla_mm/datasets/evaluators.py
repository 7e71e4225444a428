"""Checks of a config's evaluators before a run: pycocotools would end it after the first epoch."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrla_mm.arguments import type_name
from mrla_mm.datasets.coco_file import load_annotations
from mrla_mm.datasets.masks import check_masks
from mrla_mm.errors import InputError


def check_evaluator(evaluator: Mapping | Sequence | None, phase: str, dataset_files: Sequence[Path] = ()) -> None:
    """Raise InputError if an evaluator's own annotation file is missing, broken, or of other images than the data."""
    for metric in evaluator if isinstance(evaluator, list | tuple) else [evaluator or {}]:
        path = metric.get("ann_file")
        if path is None or "://" in path or (metric.get("backend_args") or {}).get("backend", "local") != "local":
            continue
        if not Path(path).is_file():
            files = f", {dataset_files[0]}" if len(dataset_files) == 1 else ""
            raise InputError(
                f"{phase}_evaluator: annotation file {path} does not exist; set {phase}_evaluator.ann_file to the file "
                f"of {phase}_dataloader{files}"
            )
        if type_name(metric.get("type")) == "CocoMetric" and not metric.get("format_only"):
            wanted = metric.get("metric", "bbox")
            masks = "segm" in (wanted if isinstance(wanted, list | tuple) else [wanted])
            check_ground_truth(Path(path), phase, dataset_files, masks=masks)


def check_ground_truth(path: Path, phase: str, dataset_files: Sequence[Path], *, masks: bool) -> None:
    """Raise InputError for a file that pycocotools would refuse after the first epoch, or count wrongly.

    An empty file gives a warning.
    """
    content = load_annotations(path, needed=("images", "categories"))
    entries = content.get("annotations", ())
    lacking = next((number for number, entry in enumerate(entries) if "iscrowd" not in entry), None)
    if lacking is not None:
        raise InputError(
            f"{phase}_evaluator: {path}: annotations[{lacking}] has no iscrowd, which pycocotools needs; "
            'write "iscrowd": 0 into every annotation of a single object'
        )
    if text := next((entry["id"] for entry in entries if isinstance(entry["id"], str)), None):
        raise InputError(f"{phase}_evaluator: {path}: an annotation has id={text!r}, but pycocotools needs numbers")
    if any(entry["id"] == 0 for entry in entries):
        warnings.warn(
            f"{path}: 1 of {len(entries)} annotations has the id 0, by which pycocotools means no match: its object "
            f"counts as never found by {phase}. Number the annotations from 1",
            stacklevel=2,
        )
    if masks and "images" in content:
        check_masks(content, enumerate(entries), path, whole=True)
    if "images" in content and not entries:
        warnings.warn(f"{path} has no annotations: every AP of {phase} will be -1", stacklevel=2)
    for other in dataset_files:
        if "images" not in content or other.samefile(path):
            continue
        known = {image["id"] for image in content["images"]}
        images = load_annotations(other, needed=("images", "categories")).get("images", ())
        if any(image["id"] not in known for image in images):
            raise InputError(
                f"{phase}_evaluator.ann_file={path} lacks images of the {phase} data set ({other}); set it to that file"
            )
