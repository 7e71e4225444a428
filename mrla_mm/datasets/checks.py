"""Checks of a config's data sets before a run: files, folders, class names and head sizes."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mmdet.registry import DATASETS
from mmengine.config import Config

from mrla_mm.datasets.class_folders import check_class_folders, check_mixed_labels, check_same_folders
from mrla_mm.datasets.coco_file import load_annotations
from mrla_mm.datasets.config_parts import (
    Place,
    check_head_sizes,
    is_local,
    leaf_datasets,
    misspelt_names,
    near_names,
    placed_datasets,
    shorten,
    whereabouts,
)
from mrla_mm.datasets.evaluators import check_evaluator
from mrla_mm.datasets.images import check_listed_images
from mrla_mm.datasets.losses import used_annotations, warn_of_losses
from mrla_mm.datasets.masks import check_masks
from mrla_mm.errors import InputError


def check_datasets(cfg: Config, phases: Iterable[str]) -> None:
    """Check the data sets and evaluators of a config for the given phases ("train", "val", "test").

    Formats and class counts are known for detection (mmdet) and classification (mmpretrain); of configs of other
    scopes only the loaders are checked.

    Raises:
        InputError: a file or folder is missing or broken, no object would be left to train on, class names match
            nothing, the train and evaluation sets number their classes differently, or a head has another size.
    """
    labels, folders = {}, {}
    for phase in phases:
        loader = cfg.get(f"{phase}_dataloader")
        if loader is None:
            continue
        check_loader(loader, phase)
        if cfg.get("default_scope") == "mmpretrain":
            for place, dataset in placed_datasets(cfg, phase):
                folders.setdefault(phase, check_class_folders(dataset, cfg.model, phase, option=place.option))
            if phase == "train":
                check_mixed_labels(cfg)
        if cfg.get("default_scope") != "mmdet":
            continue
        for place, dataset in placed_datasets(cfg, phase):
            classes = class_names(dataset)
            if classes is not None:
                check_head_sizes(cfg.model, len(classes), phase=phase)
            if is_coco(dataset) and is_local(dataset):
                labels.setdefault(phase, check_coco(dataset, classes, phase, place=place))
        check_evaluator(cfg.get(f"{phase}_evaluator"), phase, annotation_files(loader["dataset"]))
    if {"train", "val"} <= set(labels):
        check_same_labels(labels["train"], labels["val"])
    check_same_folders(folders.get("train"), folders.get("val"))


def check_loader(loader: Mapping, phase: str) -> None:
    """Refuse batch sizes and worker counts that torch would refuse much later, or in other words."""
    for key, low in (("batch_size", 1), ("num_workers", 0)):
        value = loader.get(key, low)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InputError(f"{phase}_dataloader.{key}={value!r} must be a whole number of at least {low}")
    if loader.get("persistent_workers") and loader.get("num_workers", 0) == 0:
        raise InputError(
            f"{phase}_dataloader: persistent_workers=True needs workers; with num_workers=0 "
            f"also set {phase}_dataloader.persistent_workers=False"
        )


def dataset_class(dataset: Mapping) -> type | None:
    """Return the class that a data set's config names, None where it is not registered with mmdet."""
    kind = dataset.get("type")
    return DATASETS.get(kind) if isinstance(kind, str) else kind


def is_coco(dataset: Mapping) -> bool:
    """Whether mmdet reads this data set with its COCO reader, whose format is known here."""
    from mmdet.datasets import CocoDataset

    kind = dataset_class(dataset)
    return isinstance(kind, type) and kind.load_data_list is CocoDataset.load_data_list


def reads_what_is_listed(dataset: Mapping) -> bool:
    """Whether the images read are those of the file's names: a subclass may find others, or leave missing ones out."""
    from mmdet.datasets import CocoDataset

    kind = dataset_class(dataset)
    return all(getattr(kind, name) is getattr(CocoDataset, name) for name in ("parse_data_info", "filter_data"))


def class_names(dataset: Mapping) -> list[str] | None:
    """Return the class names a data set is built with, None if it has none.

    Raises:
        InputError: they are no list of names; a single string would be taken for its letters.
    """
    classes = (dataset.get("metainfo") or {}).get("classes")
    if classes is None:
        classes = getattr(dataset_class(dataset), "METAINFO", {}).get("classes")
    if isinstance(classes, str):
        if Path(classes).is_file():
            return Path(classes).read_text().splitlines()
        raise InputError(
            f"metainfo.classes={classes!r} is one string; write a tuple, metainfo=dict(classes=({classes!r},))"
        )
    if classes is not None and (not isinstance(classes, list | tuple | set) or not classes):
        raise InputError(f"metainfo.classes={classes!r} must be a tuple of names, such as ('cat', 'dog')")
    return None if classes is None else list(classes)


def annotation_path(dataset: Mapping) -> Path:
    """Return where a data set's annotation file lies."""
    return Path(dataset.get("data_root") or "") / dataset.get("ann_file", "")


def annotation_files(dataset: Mapping) -> list[Path]:
    """Return the annotation files of the COCO data sets inside wrappers."""
    return [annotation_path(leaf) for leaf in leaf_datasets(dataset) if is_coco(leaf) and is_local(leaf)]


def check_coco(dataset: Mapping, classes: list[str], phase: str, *, place: Place) -> list[str]:
    """Check one COCO data set; return its class names in the order in which mmdet numbers them.

    Raises:
        InputError: see `check_datasets`.
    """
    training = not dataset.get("test_mode", phase != "train")
    needed = ("images", "annotations", "categories") if training else ("images", "categories")
    content, labels = check_annotations(dataset, classes, phase, needed=needed, place=place)
    ann_file, root = annotation_path(dataset), Path(dataset.get("data_root") or "")
    folder = root / (dataset.get("data_prefix") or {}).get("img", "")
    check_image_folder(folder, phase, place)
    if "annotations" in content and training:
        check_not_filtered_out(content, classes, dataset.get("filter_cfg") or {}, ann_file)
    with_mask = loads_masks(dataset.get("pipeline") or ())
    if "images" in content and with_mask:
        check_masks(content, used_annotations(content, classes), ann_file)
    if "images" in content and dataset.get("indices") is None and reads_what_is_listed(dataset):
        check_listed_images(listed_images(content, dataset, classes, training=training), folder, phase, ann_file)
    if "annotations" in content and training:
        warn_of_losses(content, classes, dataset.get("filter_cfg") or {}, ann_file, with_mask=with_mask)
    return labels


def check_annotations(
    dataset: Mapping, classes: list[str], phase: str, *, needed: Sequence[str], place: Place
) -> tuple[Mapping, list[str]]:
    """Check the annotation file of a COCO data set, whose images need not be there.

    Returns:
        tuple: its content, as far as `load_annotations` reads it, and the class names in the order of mmdet's numbers.

    Raises:
        InputError: the file is missing or broken, or has none of the classes.
    """
    ann_file = annotation_path(dataset)
    if not ann_file.is_file():
        raise InputError(missing_file(dataset, phase, place))
    content = load_annotations(ann_file, needed=needed)
    if content.get("images") == []:
        raise InputError(f"{phase} data: annotation file {ann_file} lists no images; give one that does")
    return content, check_categories([c["name"] for c in content["categories"]], classes, ann_file)


def loads_masks(pipeline: Sequence) -> bool:
    """Whether a pipeline reads the masks of the annotations."""
    return any("LoadAnnotations" in str(step.get("type")) and step.get("with_mask") for step in pipeline)


def missing_file(dataset: Mapping, phase: str, place: Place) -> str:
    """Return the message for an annotation file that is not there: what to check or set."""
    path, root = annotation_path(dataset), dataset.get("data_root")
    own = f"{place.path}.ann_file"
    move = f"set its place: --cfg-options {place.option}=/path/to/set"
    if not root or path == Path(dataset.get("ann_file", "")):
        remedy = f"Correct {own}"
    elif below := folder_with(dataset["ann_file"], Path(root)):
        remedy = f"It is in {below}: --cfg-options {place.option}={below}"
    elif Path(root).is_dir():
        remedy = f"Correct {own}, which is seen from its data_root {root}; or if the data set is elsewhere, {move}"
    else:
        remedy = f"Put or link the data set there (ln -s /path/to/set {Path(root)}), or {move}"
    return f"{phase} data: annotation file {path} does not exist ({whereabouts(path)}). {remedy}"


def folder_with(name: str, root: Path) -> Path | None:
    """Return the folder directly below a root in which a file of this relative name is; None without one."""
    # Of what may not be read, such as the lost+found of a disk, these two say that nothing is there.
    return next((folder for folder in sorted(root.glob("*")) if os.path.isfile(folder / name)), None)


def check_image_folder(folder: Path, phase: str, place: Place) -> None:
    """Raise InputError for an image folder that is missing or holds nothing."""
    hint = f"set {place.path}.data_prefix.img (relative to its data_root), or {place.option}"
    if not folder.is_dir():
        raise InputError(f"{phase} data: image folder {folder} does not exist; {hint}")
    if next(folder.iterdir(), None) is None:
        raise InputError(f"{phase} data: image folder {folder} is empty; put the images there or {hint}")


def check_categories(names: Sequence[str], classes: Sequence[str], ann_file: Path) -> list[str]:
    """Compare an annotation file's category names with a data set's class names.

    mmdet numbers the classes in the order of the file's categories, and leaves out those that the file lacks.

    Raises:
        InputError: no name matches, so that mmdet would train or evaluate on nothing; or one that the file lacks is
            but another spelling of a category that is not used.
    """
    labels = [name for name in names if name in set(classes)]
    if not labels:
        raise InputError(
            f"no class name matches a category of {ann_file}: the config has {shorten(classes)}, the file has "
            f"{shorten(names)}{near_names(classes, names)}. Set <phase>_dataloader.dataset.metainfo.classes to the "
            "file's names (spelling and case count), for train, val and test alike, and num_classes of every "
            "head to their number"
        )
    if missing := [name for name in classes if name not in labels]:
        others = [name for name in names if name not in set(classes)]
        if misspelt := misspelt_names(missing, others):
            raise InputError(
                f"{ann_file} has no category for {shorten(missing)}{misspelt}: mmdet would train without what is but "
                "written differently. Set <phase>_dataloader.dataset.metainfo.classes to the file's names, for train, "
                "val and test alike, or leave these classes out of it"
            )
        warnings.warn(
            f"{ann_file} has no category for {len(missing)} of {len(classes)} classes: {shorten(missing)}"
            f"{near_names(missing, others)}. mmdet "
            "numbers the classes that are there from 0, so names shown with predictions are shifted, and an evaluation "
            f"in which one of the labels from {len(labels)} on is predicted ends the run; add the categories to the "
            "file (they may be without annotations) or drop these classes",
            stacklevel=2,
        )
    elif labels != list(classes):
        warnings.warn(
            f"{ann_file} lists its categories in another order ({shorten(labels)}) than the config its classes "
            f"({shorten(classes)}). mmdet numbers classes in the file's order, so names shown with predictions are "
            "exchanged; write metainfo.classes in the file's order",
            stacklevel=2,
        )
    return labels


def check_same_labels(train: Sequence[str], val: Sequence[str]) -> None:
    """Raise InputError if the label numbers of the training and evaluation files mean different classes."""
    if list(train) != list(val):
        position = next(
            (i for i, (a, b) in enumerate(zip(train, val, strict=False)) if a != b), min(len(train), len(val))
        )
        raise InputError(
            f"the training and val annotation files number their classes differently from label {position} on "
            f"({shorten(train[position:])} against {shorten(val[position:])}): evaluation would compare the wrong "
            "classes. Give both files the same list of categories in the same order"
        )


def listed_images(content: Mapping, dataset: Mapping, classes: Sequence[str], *, training: bool) -> list[str]:
    """Return the file names of the images that mmdet would read; training leaves out what the filters do."""
    filters = (dataset.get("filter_cfg") or {}) if training else {}
    images = [each for each in content["images"] if min(each["width"], each["height"]) >= filters.get("min_size", 0)]
    if filters.get("filter_empty_gt", False):
        used = {annotation["image_id"] for _, annotation in used_annotations(content, classes)}
        images = [image for image in images if image["id"] in used]
    return [image["file_name"] for image in images]


def check_not_filtered_out(content: Mapping, classes: Sequence[str], filters: Mapping, ann_file: Path) -> None:
    """Raise InputError if the data set's filters leave no image, or no image has an object to train on."""
    wanted = {category["id"] for category in content["categories"] if category["name"] in set(classes)}
    used = {annotation["image_id"] for annotation in content["annotations"] if annotation["category_id"] in wanted}
    images = content["images"]
    large = [image for image in images if min(image["width"], image["height"]) >= filters.get("min_size", 0)]
    counts = f"{len(images)} images, {len(content['annotations'])} annotations"
    if not any(image["id"] in used for image in images):
        raise InputError(
            f"{ann_file}: no image has an annotation of the classes {shorten(classes)} ({counts}), nothing to train "
            "on; check category_id and image_id of its annotations"
        )
    if not any(image["id"] in used or not filters.get("filter_empty_gt", False) for image in large):
        raise InputError(
            f"{ann_file}: all images are filtered out ({counts}): none with objects has a short side of at least "
            f"{filters.get('min_size', 0)} pixels. Lower train_dataloader.dataset.filter_cfg.min_size"
        )
