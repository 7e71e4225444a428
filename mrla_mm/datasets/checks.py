"""The check of data before a run: what mmdet would get wrong without a word."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import Logger

from mmengine.dataset import BaseDataset
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from mrla_mm.errors import InputError

OTHER_HEADS = {
    "rpn_head",
    "semantic_head",
}  # whose `num_classes` does not count the classes of the data set


@HOOKS.register_module()
class DatasetCheckHook(Hook):
    """Check the data sets that a run has built, before its first batch.

    Every image exists and is not empty; a COCO file has every class of the data set (mmdet drops
    the others, and numbers the rest in the file's order); training and validation number their
    classes alike; `num_classes` of every head is their number; there is an object to train on. The
    log gets the number of objects that training skips.

    Raises:
        InputError: naming the first fault found.
    """

    def before_run(self, runner: Runner) -> None:
        """Check every data set of the run, in the main process; each annotation file is parsed once."""
        if not is_main_process():
            return
        model = getattr(runner.model, "module", runner.model)
        files, first, trained = {}, [], []
        for phase in ("train", "val", "test"):
            dataset = getattr(
                getattr(getattr(runner, f"_{phase}_loop"), "dataloader", None), "dataset", None
            )
            for leaf in leaf_datasets(dataset):
                labels, objects = check_dataset(leaf, model, phase, files, runner.logger)
                if phase == "train":
                    trained.append(objects)
                first = first or labels
                if labels and labels != first:
                    pair = next(
                        (pair for pair in zip(first, labels, strict=False) if pair[0] != pair[1]),
                        ("", ""),
                    )
                    raise InputError(
                        f"the data sets number their classes differently ({len(first)} and {len(labels)} classes, "
                        f"first difference {pair[0]!r} and {pair[1]!r}): give all annotation files the same "
                        "categories, or all folders the same classes, in the same order"
                    )
        if trained and not any(objects is None or objects for objects in trained):
            raise InputError(
                "train data: no image has an object to learn; check that class names equal the file's categories, and "
                "that boxes are [x, y, width, height] in pixels"
            )


def leaf_datasets(dataset: object) -> Iterator[BaseDataset]:
    """Yield mmengine's data sets inside wrappers that repeat, mix or concatenate them."""
    if hasattr(dataset, "datasets"):
        for part in dataset.datasets:
            yield from leaf_datasets(part)
    elif hasattr(dataset, "dataset"):
        yield from leaf_datasets(dataset.dataset)
    elif isinstance(dataset, BaseDataset):
        yield dataset


def check_dataset(
    dataset: BaseDataset, model: nn.Module, phase: str, files: dict[str, tuple], logger: Logger
) -> tuple[list[str], int | None]:
    """Check one data set; `files` keeps what `read_coco` returned.

    Returns:
        Its class names in the order of their labels, and its number of objects to learn, None if it
        is not for detection.
    """
    dataset.full_init()
    paths, objects = [], None
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        paths.append(info.get("img_path"))
        if "instances" in info:
            objects = (objects or 0) + sum(
                not each.get("ignore_flag") for each in info["instances"]
            )
    check_images(paths, dataset, phase)
    classes = list(dataset.metainfo.get("classes") or ())
    if "thing_classes" not in dataset.metainfo:  # panoptic heads count things and stuff apart
        check_heads(model, len(classes), phase)
    if not is_coco(dataset) or not os.path.isfile(dataset.ann_file):
        return list(getattr(dataset, "folder_to_idx", None) or classes), objects
    path = os.path.realpath(dataset.ann_file)
    if path not in files:
        files[path] = read_coco(path, classes, (dataset.filter_cfg or {}).get("min_size", 0))
    categories, annotations, skipped = files[path]
    if phase == "train" and skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        logger.info(
            f"{dataset.ann_file}: training skips {skipped.total()} of {annotations} objects: {reasons}"
        )
    return check_categories(categories, classes, dataset.ann_file, logger), objects


def is_coco(dataset: BaseDataset) -> bool:
    """Whether mmdet reads the data set with its COCO reader."""
    from mmdet.datasets import CocoDataset

    return type(dataset).load_data_list is CocoDataset.load_data_list


def check_images(paths: Sequence, dataset: BaseDataset, phase: str) -> None:
    """Raise InputError naming the first image that is missing or empty; of an empty file, OpenCV gives no name."""
    remote = (getattr(dataset, "backend_args", None) or {}).get("backend", "local") != "local"
    local = (
        []
        if remote or not dataset.ann_file
        else [p for p in paths if isinstance(p, str) and "://" not in p]
    )
    with ThreadPoolExecutor(8) as pool:  # a network file system takes its time for each file
        sizes = pool.map(lambda path: os.path.isfile(path) and os.path.getsize(path), local)
        faulty = [path for path, size in zip(local, sizes, strict=True) if not size]
    if faulty:
        raise InputError(
            f"{phase} data: {len(faulty)} of {len(local)} images in {dataset.ann_file} are missing or empty, the first "
            f"is {faulty[0]}: complete the folder, or correct data_prefix"
        )


def check_heads(model: nn.Module, classes: int, phase: str) -> None:
    """Raise InputError if a head has another number of classes."""
    sizes = {
        name: getattr(module, "num_classes", classes) for name, module in model.named_modules()
    }
    heads = {
        name: size
        for name, size in sizes.items()
        if "head" in name and not OTHER_HEADS & set(name.split("."))
    }
    wrong = [f"{name}.num_classes={size}" for name, size in heads.items() if size != classes]
    if classes and wrong:
        raise InputError(
            f"the {phase} data has {classes} classes, but the model has {', '.join(wrong)}: set num_classes of every "
            "head, or metainfo.classes of every data set"
        )


def check_categories(
    names: Sequence[str], classes: Sequence[str], ann_file: str, logger: Logger
) -> list[str]:
    """Return a file's names of the classes in its order, by which mmdet numbers them."""
    labels = [name for name in names if name in classes]
    missing = [name for name in classes if name not in labels]
    if missing:
        raise InputError(
            f"{ann_file} has no category {missing[0]!r} ({len(missing)} of {len(classes)} classes are missing; it has "
            f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}): mmdet would drop them and number "
            "the others anew. Set metainfo.classes of every data set to the file's names, and num_classes of every head"
        )
    if labels != list(classes):
        logger.warning(
            f"{ann_file} lists its categories in another order than the data set its classes. mmdet numbers them in "
            "the file's order, so names drawn into pictures are exchanged: write metainfo.classes in the file's order"
        )
    return labels


def read_coco(
    path: str, classes: Sequence[str], min_size: float
) -> tuple[list[str], int, Counter[str]]:
    """Return the categories of a COCO file, its number of objects, and how many mmdet does not train on, by reason."""
    with open(path, "rb") as file:
        content = json.load(file)
    images = {image["id"]: image for image in content["images"]}
    wanted = {category["id"] for category in content["categories"] if category["name"] in classes}
    skipped = Counter()
    for annotation in content.get("annotations", ()):
        image = images.get(annotation["image_id"])
        if image is None:
            skipped["on images that are not listed"] += 1
            continue
        x, y, width, height = annotation["bbox"]
        inside = min(x + width, image["width"]) > max(x, 0) and min(
            y + height, image["height"]
        ) > max(y, 0)
        if annotation["category_id"] not in wanted:
            skipped["of other categories"] += 1
        elif annotation.get("ignore") or annotation.get("iscrowd"):
            skipped["crowds or ignored"] += 1
        elif width < 1 or height < 1 or annotation["area"] <= 0:
            skipped["smaller than a pixel"] += 1
        elif not inside:
            skipped["outside their image"] += 1
        elif min(image["width"], image["height"]) < min_size:
            skipped[f"on images smaller than filter_cfg.min_size={min_size}"] += 1
    names = [category["name"] for category in content["categories"]]
    return names, len(content.get("annotations", ())), skipped
