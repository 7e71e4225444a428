"""Checks of classification data sets before a run: a folder for each class, or a list of images with their labels."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrla_mm.datasets.config_parts import check_head_sizes, head_sizes, is_local, shorten, whereabouts
from mrla_mm.errors import InputError

LAYOUT = "expected is a folder for each class with its images (<data_root>/<split>/<class>/*.jpg, as ImageNet has it)"


def check_class_folders(dataset: Mapping, model: Mapping, phase: str, *, option: str = "data_root") -> list[str] | None:
    """Check a classification data set and the size of the model's head; return the names of its class folders.

    `option` is the override that moves the data set.

    Data sets of other kinds and remote ones are left to mmpretrain, for which None is returned, as for those whose
    labels come from a file.

    Raises:
        InputError: a folder or file is missing or empty, the number of classes is not that of the class folders, or a
            head has another size.
    """
    kind = folder_class(dataset)
    if kind is None or not is_local(dataset):
        return None
    root = Path(dataset.get("data_root") or "").expanduser()
    split = dataset.get("split") or ""
    folder, ann_file = root / (image_prefix(dataset) or split), dataset.get("ann_file") or ""
    if not folder.is_dir():
        raise InputError(missing_folder(folder, phase, option))
    if split == "test" or dataset.get("with_label") is False:
        return None
    if not ann_file and split and (root / "meta" / f"{split}.txt").is_file():
        ann_file = f"meta/{split}.txt"
    classes = class_names(dataset, kind)
    if ann_file:
        largest = check_list(root / ann_file, classes, phase, option)
        if classes:
            check_head_sizes(model, len(classes), phase=phase)
        elif small := [f"{path}={size}" for path, size in head_sizes(model) if size <= largest]:
            raise InputError(f"{phase} data: {root / ann_file} has labels up to {largest}, but {', '.join(small)}")
        return None
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    check_folder_names(names, classes, folder, phase)
    if not any(has_image(folder / name, kind) for name in names):
        raise InputError(f"{phase} data: no folder below {folder} holds an image; {LAYOUT}")
    check_head_sizes(model, len(names), phase=phase)
    return names


def folder_class(dataset: Mapping) -> type | None:
    """Return the class of a data set that mmpretrain reads from class folders or a list, None for any other."""
    from mmpretrain.datasets import CustomDataset
    from mmpretrain.registry import DATASETS

    kind = dataset.get("type")
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    reads_folders = isinstance(kind, type) and getattr(kind, "load_data_list", None) is CustomDataset.load_data_list
    return kind if reads_folders else None


def image_prefix(dataset: Mapping) -> str:
    """Return the folder of the images below the data set's root, as its config has it."""
    prefix = dataset.get("data_prefix") or ""
    return (prefix.get("img_path") or "") if isinstance(prefix, Mapping) else prefix


def class_names(dataset: Mapping, kind: type) -> list[str] | None:
    """Return the class names a data set is built with, None if it takes those of its folders."""
    classes = (dataset.get("metainfo") or {}).get("classes") or dataset.get("classes")
    if isinstance(classes, str):
        path = Path(classes).expanduser()
        if not path.is_file():
            raise InputError(f"classes={classes!r} is no file; write a tuple of names, or the path of a file of names")
        classes = path.read_text(encoding="utf-8").splitlines()
    if classes is None:
        classes = getattr(kind, "METAINFO", {}).get("classes")
    return None if classes is None else list(classes)


def missing_folder(folder: Path, phase: str, option: str) -> str:
    """Return the message for an image folder that is not there."""
    return (
        f"{phase} data: image folder {folder} does not exist ({whereabouts(folder)}); {LAYOUT}. Put or link the data "
        f"set there, or set its place: --cfg-options {option}=/path/to/set"
    )


def check_folder_names(names: Sequence[str], classes: Sequence[str] | None, folder: Path, phase: str) -> None:
    """Raise InputError if there are no class folders or not as many as classes; warn if names are exchanged."""
    if not names:
        raise InputError(f"{phase} data: {folder} has no class folders; {LAYOUT}")
    if classes is None:
        return
    if len(classes) != len(names):
        raise InputError(
            f"{phase} data: {folder} has {len(names)} class folders ({shorten(names)}), the data set is built with "
            f"{len(classes)} classes. Complete the folders, or for a data set of your own give its names in the order "
            f"of the sorted folders: {phase}_dataloader.dataset.metainfo.classes (ImageNet's 1000 are the default of "
            "type='ImageNet'), and model.head.num_classes"
        )
    if set(classes) == set(names) and list(classes) != list(names):
        warnings.warn(
            f"{phase} data: labels follow the sorted folders of {folder} ({shorten(names)}), but classes are named in "
            f"another order ({shorten(classes)}): names shown with predictions are exchanged",
            stacklevel=2,
        )


def check_mixed_labels(cfg: Mapping) -> None:
    """Raise InputError if the labels that a batch's mixing makes count other classes than the head.

    Args:
        cfg: config of a training whose model is a classifier of mmpretrain.
    """
    model = cfg["model"]
    own = "model.data_preprocessor" if model.get("data_preprocessor") else "data_preprocessor"
    preprocessor = model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    mixing = (model.get("train_cfg") or {}).get("augments") or preprocessor.get("batch_augments")
    count = preprocessor.get("num_classes")
    for path, size in head_sizes(model):
        if (mixing or preprocessor.get("to_onehot")) and isinstance(count, int) and count != size:
            raise InputError(
                f"{own}.num_classes={count}, by which the labels of mixed images are written, but {path}={size}: "
                f"set --cfg-options {own}.num_classes={size} (or the same in the config)"
            )


def check_same_folders(train: Sequence[str] | None, val: Sequence[str] | None) -> None:
    """Raise InputError if training and evaluation number their classes by different folders."""
    if train is None or val is None or list(train) == list(val):
        return
    only = {"train": sorted(set(train) - set(val)), "val": sorted(set(val) - set(train))}
    found = "; ".join(f"only {phase} has {shorten(names)}" for phase, names in only.items() if names)
    raise InputError(
        f"the train and val data have different class folders ({found}), so their labels mean different classes; give "
        "both the same folders, empty ones included"
    )


def check_list(path: Path, classes: Sequence[str] | None, phase: str, option: str) -> int:
    """Check a file of `image label` lines; return its largest label.

    Raises:
        InputError: it is missing or empty, or a line has no label or one beyond the classes.
    """
    if not path.is_file():
        raise InputError(
            f"{phase} data: list of images {path} does not exist; correct ann_file, or set its place: --cfg-options "
            f"{option}=/path/to/set"
        )
    labels = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            label = line.rpartition(" ")[2].strip()
            if not line.strip():
                continue
            if " " not in line.strip() or not label.isdecimal() or (classes and int(label) >= len(classes)):
                limit = f" below {len(classes)}" if classes else ""
                raise InputError(
                    f"{phase} data: line {number} of {path} is {line.strip()[:60]!r}; expected is an image and its "
                    f"label, a number{limit}, with a space between"
                )
            labels.append(int(label))
    if not labels:
        raise InputError(f"{phase} data: list of images {path} is empty")
    return max(labels)


def has_image(folder: Path, kind: type) -> bool:
    """Whether a folder or one below it holds a file that mmpretrain takes for an image."""
    suffixes = getattr(kind, "IMG_EXTENSIONS", (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif"))
    return any(name.lower().endswith(suffixes) for _, _, names in os.walk(folder) for name in names)
