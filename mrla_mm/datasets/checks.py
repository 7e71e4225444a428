"""The check of data before a run, for faults that mmdet misses or reports as array errors."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import BaseVideoDataset, CocoDataset
from mmengine.dataset import BaseDataset
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import BaseLoop, Runner
from torch import nn

from mrla_mm.datasets.coco_checks import Findings, inspect_coco
from mrla_mm.errors import InputError
from mrla_mm.registry import register

IMAGES = 5  # of a data set that are opened
OTHER_HEADS = {"rpn_head", "semantic_head"}  # their num_classes does not count the data's classes


@register(HOOKS)
class DatasetCheckHook(Hook):
    """Check a run's data before its first batch: files, unless one of our tools did, and images."""

    def before_run(self, runner: Runner) -> None:
        """Check the data sets of the loops that the runner has built."""
        loops = dict(train=runner._train_loop, val=runner._val_loop, test=runner._test_loop)
        loops = {name: loop for name, loop in loops.items() if isinstance(loop, BaseLoop)}
        check_data(runner, *loops)
        if is_main_process() and runner.cfg.get("check_data", True):
            faults = []
            for loop in loops.values():
                faults += inspect_images(loop.dataloader.dataset)
            if faults:
                raise InputError("\n".join(faults))


def inspect_images(dataset: object) -> list[str]:
    """Open a few images of a data set, or of each that it wraps; return the first fault of each."""
    parts = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    if parts != [None]:
        return [fault for part in parts for fault in inspect_images(part)]
    steps = getattr(getattr(dataset, "pipeline", None), "transforms", ())
    loading = next((step for step in steps if isinstance(step, LoadImageFromFile)), None)
    if loading is None or not len(dataset):
        return []
    for index in sorted({*np.linspace(0, len(dataset) - 1, IMAGES, dtype=int).tolist()}):
        sample = dataset.get_data_info(index)
        if "img_path" in sample and (fault := inspect_image(sample, loading)):
            return [f"image {sample['img_path']} {fault}"]
    return []


def inspect_image(sample: Mapping, loading: LoadImageFromFile) -> str | None:
    """Return a fault of an image that is missing, no image, or not as large as its record says."""
    try:
        loaded = loading(dict(img_path=sample["img_path"]))
    except FileNotFoundError:
        return "does not exist: correct data_root, data_prefix or the file_name of the annotations"
    except Exception as error:  # whatever a decoder or a back end raises
        return f"cannot be read, {type(error).__name__}: {error}".strip() + ": replace it"
    found = list(loaded["img"].shape[:2]) if loaded else None  # None if the step skips bad files
    stated = [sample.get("height"), sample.get("width")]
    # A photo that its EXIF data turns may be stated either way round.
    if not found or None in stated or sorted(found) == sorted(stated):
        return None
    told = "is {1} x {0} pixels (width x height), but the annotations say {3} x {2}"
    return told.format(*found, *stated) + ": correct them, and the boxes"


def check_data(runner: Runner, *phases: str) -> None:
    """Check a run's data once: raise InputError with file and remedy of each fault, a line each.

    `check_data=False` in a config leaves it out.
    """
    if not is_main_process() or getattr(runner, "data_is_checked", False):
        return
    runner.data_is_checked = True
    if not runner.cfg.get("check_data", True):
        return
    model = getattr(runner.model, "module", runner.model)
    faults = []
    learned = []
    first_classes = {}  # of the first data set that folders number, and that a config does
    for phase in phases:
        for dataset, findings in inspect_phase(runner.cfg, phase):
            found = findings.faults + check_classes(model, dataset, first_classes)
            source = dataset.ann_file or ", ".join(map(str, dataset.data_prefix.values()))
            faults += [f"{source}: {fault}" for fault in found]
            if phase == "train":
                learned.append(findings.objects)
    if learned and None not in learned and not sum(learned):
        skipped = "crowds, other categories, boxes too small or outside, images below min_size"
        faults.append(f"no training image has an object to learn: mmdet skips {skipped}")
    if faults:
        raise InputError("\n".join(faults))


def inspect_phase(cfg: Mapping, phase: str) -> Iterator[tuple[BaseDataset, Findings]]:
    """Yield the data sets of a phase, each with what the check of its files has found."""
    loader = cfg.get(f"{phase}_dataloader") or {}
    sources = list(build_lazily(loader.get("dataset")))
    evaluators = cfg.get(f"{phase}_evaluator") or []
    evaluators = [evaluators] if isinstance(evaluators, Mapping) else evaluators
    scored = [each["ann_file"] for each in evaluators if each.get("ann_file")]
    for dataset, node in sources:
        findings = inspect_files(dataset, node, scored if len(sources) == 1 else [])
        if scored and (loader.get("drop_last") or node.get("indices") is not None):
            told = "the evaluator counts every image of its file"
            remedy = "leave out indices and drop_last, or give it a smaller file"
            findings.faults.append(f"{told}: {remedy}")
        yield dataset, findings


def build_lazily(node: Mapping | None) -> Iterator[tuple[BaseDataset, Mapping]]:
    """Yield the image data sets in a config's wrappers, annotations unread, with their configs."""
    if not isinstance(node, Mapping):
        return
    if "dataset" in node or "datasets" in node:
        for part in node.get("datasets") or [node["dataset"]]:
            yield from build_lazily(part)
        return
    try:
        dataset = DATASETS.build(dict(node, lazy_init=True, pipeline=[]))
    except TypeError:  # a data set of another kind, or a wrong argument, which mmengine names
        return
    if isinstance(dataset, BaseDataset) and not isinstance(dataset, BaseVideoDataset):
        yield dataset, node


def check_classes(model: nn.Module, dataset: BaseDataset, first_classes: dict) -> list[str]:
    """Return faults of a data set's classes; put them into `first_classes` if they are first."""
    classes = dataset.metainfo.get("classes") or ()
    if isinstance(classes, str):
        return [f"metainfo.classes={classes!r} is not a tuple: write ({classes!r},)"]
    faults = []
    folders = []
    if not dataset.ann_file and getattr(dataset, "with_label", False):  # mmpretrain's
        if not os.path.isdir(dataset.img_prefix):
            return ["is not a folder: correct data_root or data_prefix"]
        entries = Path(dataset.img_prefix).iterdir()
        folders = sorted(entry.name for entry in entries if entry.is_dir())
    if set(folders) == set(classes) and folders != list(classes):
        faults.append(f"classes are numbered by folder name: set metainfo.classes={folders}")
    names = folders or list(classes)
    if names and not getattr(dataset, "return_classes", False):  # an open vocabulary
        numbered_by = "folders" if folders else "config"
        if names != first_classes.setdefault(numbered_by, names):
            remedy = "give all the same, in one order"
            faults.append(f"numbers classes differently from the first data set: {remedy}")
        faults += check_heads(model, dataset, len(names))
    return faults


def check_heads(model: nn.Module, dataset: BaseDataset, num_classes: int) -> list[str]:
    """Return a fault if a head of the model has another number of classes."""
    wrong = []
    for name, module in model.named_modules():
        size = getattr(module, "num_classes", num_classes)
        if getattr(module, "class_agnostic", False) or OTHER_HEADS & set(name.split(".")):
            continue
        if "head" in name and size != num_classes:
            wrong.append(f"{name}.num_classes={size}")
    if not wrong or "thing_classes" in dataset.metainfo:  # panoptic heads count stuff apart
        return []
    told = f"the data set has {num_classes} classes, but the model {', '.join(wrong)}"
    return [f"{told}: set num_classes of every head, or metainfo.classes of every data set"]


def inspect_files(dataset: BaseDataset, node: Mapping, scored: Sequence[str]) -> Findings:
    """Check the files of a data set that has this config; its evaluators read those of `scored`."""
    backend = (getattr(dataset, "backend_args", None) or {}).get("backend", "local")
    is_remote = backend != "local" or "://" in dataset.ann_file
    if is_remote or isinstance(dataset.metainfo.get("classes"), str):
        return Findings([])
    try:
        methods = ("load_data_list", "parse_data_info")  # a class's own may read other files
        kind = type(dataset)
        if all(getattr(kind, each, None) == getattr(CocoDataset, each) for each in methods):
            return inspect_coco_files(dataset, node, scored)
    except OSError as error:
        return Findings([f"{error}: correct the data set's data_root or ann_file"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        told = f"not COCO's format, {type(error).__name__}: {error}"
        return Findings([f"{told}: export it as COCO's JSON, in UTF-8 without a BOM"])
    return Findings([])


def inspect_coco_files(dataset: BaseDataset, node: Mapping, scored: Sequence[str]) -> Findings:
    """Check a file in COCO's format, and that the data set's own evaluators read the same one."""
    steps = node.get("pipeline") or ()
    masks = next((step for step in steps if step.get("with_mask")), None)
    findings = inspect_coco(dataset, masks, scored=bool(scored))
    path = os.path.realpath(dataset.ann_file)
    for other in scored:
        if os.path.realpath(other) != path:
            findings.faults.append(f"the evaluator reads {other}: give it the data set's ann_file")
    return findings
