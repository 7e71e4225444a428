"""What the checks of all annotation formats have in common."""

from collections.abc import Sequence
from typing import NamedTuple

TOLERATED = 0.1  # share of objects without a usable box: real data have some


class Findings(NamedTuple):
    """What the check of a file has found."""

    faults: list[str]
    objects: int | None = None  # that are learned; None where that is not known


def missing_names(classes: Sequence[str], names: Sequence[str]) -> str:
    """Return the fault that some classes are not among the names of a file."""
    missing = [name for name in classes if name not in names]
    told = f"{missing[0]!r} ({len(missing)} of {len(classes)} classes are missing)"
    remedy = "add them to the file, or set metainfo.classes of every data set, and num_classes"
    return f"has no {told}, but {', '.join(map(repr, names[:8]))}: {remedy}"
