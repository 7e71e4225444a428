"""What the checks of all annotation formats have in common."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

TOLERATED = 0.1  # share of objects without a usable box: real data have some
READERS = 8  # at a time: a network file system takes its time for each file


class Findings(NamedTuple):
    """What the check of a file has found."""

    faults: list[str]
    objects: int | None = None  # that are learned; None where that is not known


def missing_names(classes: Sequence[str], names: Sequence[str]) -> str:
    """Return the fault that some classes are not among the names of a file."""
    missing = [name for name in classes if name not in names]
    told = f"{missing[0]!r} ({len(missing)} of {len(classes)} classes are missing)"
    remedy = "set metainfo.classes of every data set to the file's names, and every num_classes"
    return f"has no {told}, but {', '.join(map(repr, names[:8]))}: {remedy}"


def check_images(paths: Sequence[str]) -> list[str]:
    """Return a fault if images are missing or empty; OpenCV's error for the latter has no name."""
    with ThreadPoolExecutor(READERS) as pool:
        shares = pool.map(faulty_images, [paths[first::READERS] for first in range(READERS)])
        faulty = sum(shares, [])
    if not faulty:
        return []
    counts = f"{len(faulty)} of {len(paths)} images are missing or empty"
    return [f"{counts}, one is {min(faulty)}: complete the folder, or correct data_prefix"]


def faulty_images(paths: Sequence[str]) -> list[str]:
    """Return the paths at which there is no file or an empty one."""
    return [path for path in paths if not os.path.isfile(path) or not os.path.getsize(path)]
