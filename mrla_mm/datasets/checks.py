"""The check of data before a run: faults that mmdet misses or reports as errors about arrays."""

import json
import os
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.dist import is_main_process
from mmengine.fileio import list_from_file
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import BaseLoop, Runner
from torch import nn

from mrla_mm.errors import InputError

OTHER_ORDER = "numbers classes differently from the first data set: give all the same, in one order"
Findings = tuple[list[str], int | None]  # faults, and how many objects are learned if it is known
OTHER_HEADS = {"rpn_head", "semantic_head"}  # their num_classes does not count the data's classes


@HOOKS.register_module()
class DatasetCheckHook(Hook):
    """Check the data of a run before its first batch: `check_data`, unless one of our tools did."""

    def before_run(self, runner: Runner) -> None:
        """Check the data sets of the loops that the runner has built."""
        loops = dict(train=runner._train_loop, val=runner._val_loop, test=runner._test_loop)
        check_data(runner, *[name for name, loop in loops.items() if isinstance(loop, BaseLoop)])


def check_data(runner: Runner, *phases: str) -> None:
    """Check a run's data once: raise InputError with file and remedy of each fault, a line each."""
    if not is_main_process() or getattr(runner, "data_is_checked", False):
        return
    runner.data_is_checked = True
    model = getattr(runner.model, "module", runner.model)
    faults, first, learned = [], {}, []
    for phase in phases:
        sources = list(build_lazily((runner.cfg.get(f"{phase}_dataloader") or {}).get("dataset")))
        evaluators = runner.cfg.get(f"{phase}_evaluator") if len(sources) == 1 else None
        for dataset, node in sources:
            classes = dataset.metainfo.get("classes") or ()
            if isinstance(classes, str):
                faults.append(f"metainfo.classes={classes!r} is not a tuple: write ({classes!r},)")
                continue
            found, objects = inspect_files(dataset, node, evaluators)
            folders = class_folders(dataset)
            if set(folders) == set(classes) and folders != list(classes):
                found.append(f"classes are numbered by folder name: set metainfo.classes={folders}")
            names = folders or list(classes)
            if names and not getattr(dataset, "return_classes", False):  # an open vocabulary
                if names != first.setdefault(bool(folders), names):
                    found.append(OTHER_ORDER)
                found += check_heads(model, dataset, len(names))
            faults += [f"{dataset.ann_file or dataset.data_prefix}: {fault}" for fault in found]
            if phase == "train":
                learned.append(objects)
    if learned and None not in learned and not sum(learned):
        skipped = "crowds, other categories, boxes below a pixel or outside, images below min_size"
        faults.append(f"no training image has an object to learn: mmdet skips {skipped}")
    if faults:
        raise InputError("\n".join(faults))


def build_lazily(node: Mapping | None) -> Iterator[tuple[BaseDataset, Mapping]]:
    """Yield the image data sets in a config's wrappers, annotations unread, with their configs."""
    from mmdet.datasets import BaseVideoDataset

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


def class_folders(dataset: BaseDataset) -> list[str]:
    """Return the folders that mmpretrain numbers as classes, none if a file does or mmdet reads."""
    if dataset.ann_file or not getattr(dataset, "with_label", False):
        return []
    return sorted(entry.name for entry in os.scandir(dataset.img_prefix) if entry.is_dir())


def check_heads(model: nn.Module, dataset: BaseDataset, classes: int) -> list[str]:
    """Return a fault if a head of the model has another number of classes."""
    wrong = []
    for name, module in model.named_modules():
        size = getattr(module, "num_classes", classes)
        if "head" in name and size != classes and not OTHER_HEADS & set(name.split(".")):
            wrong.append(f"{name}.num_classes={size}")
    if not wrong or "thing_classes" in dataset.metainfo:  # panoptic heads count stuff apart
        return []
    told = f"the data set has {classes} classes, but the model {', '.join(wrong)}"
    return [f"{told}: set num_classes of every head, or metainfo.classes of every data set"]


def inspect_files(dataset: BaseDataset, node: Mapping, evaluators: object) -> Findings:
    """Check the files of a data set that has this config, and these evaluators to itself."""
    from mmdet.datasets import CocoDataset, XMLDataset

    backend = (getattr(dataset, "backend_args", None) or {}).get("backend", "local")
    reader, path = type(dataset).load_data_list, dataset.ann_file
    if backend != "local" or "://" in path:
        return [], None
    evaluators = [evaluators] if isinstance(evaluators, Mapping) else evaluators or []
    scored = [each["ann_file"] for each in evaluators if each.get("ann_file")]
    masks = any(step.get("with_mask") for step in node.get("pipeline") or ())
    try:
        if reader is XMLDataset.load_data_list:
            return inspect_xml(dataset)
        if reader is not CocoDataset.load_data_list:
            return [], None
        faults, objects = inspect_coco(dataset, masks=masks, crowds=bool(scored))
    except OSError as error:
        return [f"{error}: correct data_root or ann_file"], None
    except (KeyError, TypeError, ValueError) as error:
        return [f"not COCO's format, {error!r}"], None
    if any(os.path.realpath(each) != os.path.realpath(path) for each in scored):
        faults.append(f"the evaluator reads {scored[0]}: set its ann_file to the data set's")
    return faults, objects


def inspect_xml(dataset: BaseDataset) -> Findings:
    """Check the XML files of a data set, in which mmdet skips every name that is not a class."""
    names, images = Counter(), []
    for name in list_from_file(dataset.ann_file):
        images.append(os.path.join(dataset.sub_data_root, dataset.img_subdir, f"{name}.jpg"))
        file = os.path.join(dataset.sub_data_root, dataset.ann_subdir, f"{name}.xml")
        names.update(each.findtext("name") for each in ET.parse(file).iterfind("object"))
    faults, classes = check_images(images), dataset.metainfo["classes"]
    found = [name for name in classes if name in names]
    rare = found and dataset.test_mode  # a small set may lack a class
    if len(found) < len(classes) and not rare and names.keys() - set(classes):
        faults.append(missing_names(classes, list(names)))
    return faults, sum(names[name] for name in found)


def inspect_coco(dataset: BaseDataset, *, masks: bool, crowds: bool) -> Findings:
    """Check a file in COCO's format: `masks` if the pipeline loads them, `crowds` to evaluate."""
    with open(dataset.ann_file, "rb") as file:
        content = json.load(file)
    classes, annotations = dataset.metainfo["classes"], content.get("annotations", [])
    names = {category["id"]: category["name"] for category in content["categories"]}
    wanted = {number for number, name in names.items() if name in classes}
    images = {image["id"]: image for image in content["images"]}
    folder = dataset.data_prefix["img"]
    faults = check_images([os.path.join(folder, each["file_name"]) for each in images.values()])
    ordered = [name for name in names.values() if name in classes]
    if set(ordered) != set(classes):
        faults.append(missing_names(classes, list(names.values())))
    elif ordered != list(classes):
        faults.append(f"mmdet numbers classes in the file's order: set metainfo.classes={ordered}")
    if unknown := {each["category_id"] for each in annotations} - names.keys():
        ids = f"the ids of its categories are {min(names)} to {max(names)}: number both alike"
        faults.append(f"annotations have the category_id {min(unknown)}, but {ids}")
    if masks and any(not each.get("segmentation") for each in annotations):
        faults.append("boxes without segmentation: add masks, or take a detector that needs none")
    if crowds and any("iscrowd" not in each for each in annotations):
        faults.append("annotations without iscrowd, which the evaluation needs: add iscrowd=0")
    min_size = (dataset.filter_cfg or {}).get("min_size", 0)
    wrong, objects = inspect_boxes(annotations, images, wanted, min_size)
    return faults + wrong, objects


def inspect_boxes(
    annotations: Sequence[dict], images: dict[int, dict], wanted: set[int], min_size: float
) -> Findings:
    """Check the boxes of annotations, of which those of the `wanted` categories are learned."""
    rows = []
    for each in annotations:
        image = images.get(each["image_id"])
        ignored = each.get("iscrowd") or each.get("ignore") or each["category_id"] not in wanted
        if image:
            x, y, w, h = each["bbox"]
            rows.append([x, y, w, h, each["area"], image["width"], image["height"], bool(ignored)])
    x, y, w, h, area, width, height, ignored = np.reshape(rows, (-1, 8)).T
    beyond = (x + w > width + 1) | (y + h > height + 1)
    corners = (x < w) & (y < h) & (w <= width + 1) & (h <= height + 1)
    faults = []
    if corners.sum() > 0.95 * len(rows) and beyond.sum() > 0.25 * len(rows):
        faults.append("bbox seems to be [x1, y1, x2, y2]: write [x, y, width, height]")
    inside = (x < width) & (y < height) & (x + w > 0) & (y + h > 0)
    large = (w >= 1) & (h >= 1) & (area > 0) & (np.minimum(width, height) >= min_size)
    return faults, int((inside & large & (ignored == 0)).sum())


def missing_names(classes: Sequence[str], names: Sequence[str]) -> str:
    """Return the fault that some classes are not among the names of a file."""
    missing = [name for name in classes if name not in names]
    told = f"{missing[0]!r} ({len(missing)} of {len(classes)} classes are missing)"
    remedy = "set metainfo.classes of every data set to the file's names, and every num_classes"
    return f"has no {told}, but {', '.join(map(repr, names[:8]))}: {remedy}"


def check_images(paths: Sequence[str]) -> list[str]:
    """Return a fault if images are missing or empty; OpenCV's error for the latter has no name."""
    with ThreadPoolExecutor(8) as pool:  # a network file system takes its time for each file
        sizes = pool.map(lambda path: os.path.isfile(path) and os.path.getsize(path), paths)
        faulty = [path for path, size in zip(paths, sizes, strict=True) if not size]
    counts = f"{len(faulty)} of {len(paths)} images are missing or empty"
    remedy = "complete the folder, or correct data_prefix"
    return [f"{counts}, the first is {path}: {remedy}" for path in faulty[:1]]
