"""What the data set checks read in a config, whatever its task: data sets inside wrappers, and sizes of heads."""

from collections.abc import Iterator, Mapping, Sequence

from mrla_mm.errors import InputError

# Keys of a model config below which `num_classes` does not count the classes of the data set.
OTHER_CLASS_COUNTS = ("rpn_head", "backbone", "semantic_head", "data_preprocessor")


def leaf_datasets(dataset: Mapping) -> Iterator[Mapping]:
    """Yield the configs of the data sets inside wrappers that repeat, mix or concatenate them."""
    if "datasets" in dataset:
        for part in dataset["datasets"]:
            yield from leaf_datasets(part)
    elif isinstance(dataset.get("dataset"), Mapping):
        yield from leaf_datasets(dataset["dataset"])
    else:
        yield dataset


def is_local(dataset: Mapping) -> bool:
    """Whether the files of the data set lie in a file system; remote ones are left to their backend."""
    backend = (dataset.get("backend_args") or {}).get("backend", "local")
    return backend in ("local", "disk") and "://" not in f"{dataset.get('data_root')}{dataset.get('ann_file')}"


def check_head_sizes(model: Mapping, classes: int, *, where: str) -> None:
    """Raise InputError for every head of a model config whose `num_classes` is not the number of classes."""
    wrong = [f"{path}={size}" for path, size in head_sizes(model) if size != classes]
    if wrong:
        names = " ".join(f"{entry.rpartition('=')[0]}={classes}" for entry in wrong)
        raise InputError(
            f"the {where} has {classes} classes, but {', '.join(wrong)}. Set --cfg-options {names} "
            "(or the same in the config), or correct metainfo.classes"
        )


def head_sizes(node: object, path: str = "model") -> Iterator[tuple[str, int]]:
    """Yield the dotted path and value of every `num_classes` of a model config that counts data set classes."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "num_classes" and isinstance(value, int):
                yield f"{path}.{key}", value
            elif key not in OTHER_CLASS_COUNTS:
                yield from head_sizes(value, f"{path}.{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from head_sizes(value, f"{path}.{index}")


def shorten(names: Sequence[str], limit: int = 6) -> str:
    """Return the first few names, and how many there are if not all are shown."""
    shown = ", ".join(map(repr, list(names)[:limit]))
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"
