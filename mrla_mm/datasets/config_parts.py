"""What the data set checks read in a config, whatever its task: data sets inside wrappers, and sizes of heads."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

from mrla_mm.errors import InputError

# Keys of a model config below which `num_classes` does not count the classes of the data set.
OTHER_CLASS_COUNTS = ("rpn_head", "backbone", "semantic_head", "data_preprocessor")

LONG_WORD = 6  # letters of a word of which another letter seldom makes another word


def leaf_datasets(dataset: Mapping) -> Iterator[Mapping]:
    """Yield the configs of the data sets inside wrappers that repeat, mix or concatenate them."""
    for _, leaf in leaf_places(dataset):
        yield leaf


def leaf_places(dataset: Mapping, path: str = "dataset") -> Iterator[tuple[str, Mapping]]:
    """Yield the dotted path and the config of each data set inside wrappers."""
    if "datasets" in dataset:
        for index, part in enumerate(dataset["datasets"]):
            yield from leaf_places(part, f"{path}.datasets.{index}")
    elif isinstance(dataset.get("dataset"), Mapping):
        yield from leaf_places(dataset["dataset"], f"{path}.dataset")
    else:
        yield path, dataset


class Place(NamedTuple):
    """Where a data set stands in a config, and the override that moves its files."""

    path: str
    option: str


def placed_datasets(cfg: Mapping, phase: str) -> Iterator[tuple[Place, Mapping]]:
    """Yield the data sets of a phase with their places; those below the config's `data_root` move with it."""
    root = cfg.get("data_root")
    for path, leaf in leaf_places(cfg[f"{phase}_dataloader"]["dataset"], f"{phase}_dataloader.dataset"):
        moves = is_below(leaf.get("data_root") or leaf.get("ann_file"), root)
        yield Place(path, "data_root" if moves else f"{path}.data_root"), leaf


def is_below(path: object, root: object) -> bool:
    """Whether a value is a folder or lies in it; a `data_root` that is no text is a variable of the config's own."""
    if not isinstance(path, str) or not isinstance(root, str) or not root:
        return False
    return f"{path}/".startswith(f"{root.rstrip('/')}/")


def is_local(dataset: Mapping) -> bool:
    """Whether the files of the data set lie in a file system; remote ones are left to their backend."""
    backend = (dataset.get("backend_args") or {}).get("backend", "local")
    return backend in ("local", "disk") and "://" not in f"{dataset.get('data_root')}{dataset.get('ann_file')}"


def check_head_sizes(model: Mapping, classes: int, *, phase: str) -> None:
    """Raise InputError for every head of a model config whose `num_classes` is not a data set's number of classes.

    The training's data set comes first, so where only another one differs, its names are more likely wrong.
    """
    wrong = [f"{path}={size}" for path, size in head_sizes(model) if size != classes]
    if wrong:
        names = " ".join(f"{entry.rpartition('=')[0]}={classes}" for entry in wrong)
        heads = f"set --cfg-options {names} (or the same in the config)"
        names = "name your classes in the metainfo of each phase's data set"
        if phase != "train":
            heads, names = f"give {phase}_dataloader.dataset.metainfo the classes of the training's data set", heads
        raise InputError(f"the {phase} data set has {classes} classes, but {', '.join(wrong)}: {heads}, or {names}")


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


def near_names(missing: Sequence[str], names: Sequence[str]) -> str:
    """Return " (did you mean 'a' for 'A'?)" with those names that differ little from a missing one, or ""."""
    plain = {"".join(name.lower().split()): name for name in reversed(names)}
    pairs = []
    for name in missing:
        bare = "".join(name.lower().split())
        close = [bare] if bare in plain else difflib.get_close_matches(bare, plain, n=1, cutoff=0.8)
        pairs += [(name, plain[key]) for key in close]
    return did_you_mean(pairs)


def misspelt_names(missing: Sequence[str], names: Sequence[str]) -> str:
    """Return the same with those names alone that are certainly a missing one, spelt differently."""
    return did_you_mean([(name, other) for name in missing for other in names if is_misspelt(name, other)])


def did_you_mean(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the words that end a message on names, each with what may be meant; "" without any."""
    shown = ", ".join(f"{other!r} for {name!r}" for name, other in pairs[:3])
    more = f", and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return f" (did you mean {shown}{more}?)" if pairs else ""


def is_misspelt(one: str, other: str) -> bool:
    """Whether two names are one but for case, the marks between words, a plural, or one letter inside a long word.

    Likeness of the whole names would not do: with_mask and without_mask, "speed limit 30" and "speed limit 80", typical
    and atypical are very like each other.
    """
    words, others = (re.split(r"[\s_-]+", name.strip().lower()) for name in (one, other))
    if "".join(words) == "".join(others):
        return True
    pairs = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and len(pairs) == 1 and is_slip(*pairs[0])


def is_slip(one: str, other: str) -> bool:
    """Whether two words differ by a plural's s; or, if long, by one letter after the first, or two exchanged."""
    if one + "s" == other or other + "s" == one:
        return True
    if max(len(one), len(other)) < LONG_WORD or one[0] != other[0] or not (one + other).isascii():
        return False
    start = len(commonprefix((one, other)))
    rest, others = one[start:], other[start:]
    end = len(commonprefix((rest[::-1], others[::-1])))
    rest, others = rest[: len(rest) - end], others[: len(others) - end]
    exchanged = len(rest) == 2 and rest == others[::-1]
    return (rest + others).isalpha() and (exchanged or max(len(rest), len(others)) == 1)


def whereabouts(path: Path) -> str:
    """Return what is there in place of a missing file or folder, where that helps.

    What lies beside it is listed only if the nearest folder that exists is at most two levels up, and not the root of
    the file system; further up a name alone is suggested, if one is near.
    """
    parent = next((each for each in path.parents if each.is_dir()), path.parents[-1])
    below = path.relative_to(parent).parts
    if parent == Path(parent.anchor):
        return f"nothing of {path.parent} exists"
    found = sorted(each.name for each in parent.iterdir())
    if len(below) <= 2:
        return f"{parent} exists and holds {found[:8]}"
    first = parent / below[0]
    return f"there is no {first}{near_names([below[0]], found)}"
