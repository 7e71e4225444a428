"""Weight files converted to our names, their SHA-256 in the file's name."""

import hashlib
import io
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from mrla_mm.atomic import write_atomically
from mrla_mm.weights.layouts import ATTENTION
from mrla_mm.weights.loading import KeyStatus, LoadReport, load_weights
from mrla_mm.weights.states import BACKBONE


def convert(
    location: str | Path,
    backbone: nn.Module,
    *,
    folder: str | Path,
    stem: str | None = None,
    prefix: str | None = None,
    entry: str | None = None,
) -> tuple[Path, LoadReport, list[str]]:
    """Write a weight file of any accepted layout with our names, `backbone.` before them.

    A classifier's head goes along; other parts of a model are left out. `location`, `prefix` and
    `entry` are those of `load_weights`, the backbone is freshly built, and `stem` is the new file's
    name before its hash. Returned are the new file, how the old one loaded, and the keys that were
    left out. Raises as `load_weights` and `write_atomically` do.
    """
    report = load_weights(backbone, location, prefix=prefix, entry=entry)
    head = {key: value for key, value in report.outside.items() if key.startswith("head.")}
    used = {f"{BACKBONE}{key}": value for key, value in report.loadable.items()}
    weights = OrderedDict(used | head)
    if any(ATTENTION in key for key in used):
        weights._metadata = nn.ModuleDict({"backbone": backbone}).state_dict()._metadata
    left_out = [key for key in report.outside if key not in head]
    left_out += report.keys[KeyStatus.NO_SUCH_PART]
    buffer = io.BytesIO()  # torch.save stores a file's name in it, which would change the hash
    torch.save({"meta": dict(report.meta), "state_dict": weights}, buffer)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    stem = stem or f"{Path(location).stem}-mrla_mm"
    path = Path(folder) / f"{stem}-{digest[:8]}.pth"
    write_atomically(path, buffer.getbuffer())
    return path, report, left_out
