"""Published and converted checkpoints: weights and plain metadata, their SHA-256 in the name."""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mrla_mm.atomic import write_atomically
from mrla_mm.version import __version__
from mrla_mm.weights.files import NAMED_DIGEST
from mrla_mm.weights.layouts import ATTENTION
from mrla_mm.weights.loading import Fate, LoadReport, load_weights
from mrla_mm.weights.states import BACKBONE, find_state

KEPT_META = "epoch", "iter", "experiment_name", "mmengine_version", "dataset_meta", "CLASSES", "cfg"


def publishable(checkpoint: Mapping) -> tuple[dict, list[str]]:
    """Return the entries of a training checkpoint to publish, and the names of the others.

    Of a model and its average, the one that mmengine evaluates stays. Raises InputError if the
    checkpoint holds no weights.
    """
    source = find_state(checkpoint, prefix="")
    others = [str(key) for key, value in checkpoint.items() if not isinstance(value, Tensor)]
    left = [name for name in others if name not in (*source.entries, "meta")]
    return pack(source.state, checkpoint.get("meta") or {}), left


def pack(state: Mapping[str, Tensor], meta: Mapping) -> dict:
    """Return a checkpoint of a state dict with the plain metadata of another."""
    kept = {key: meta[key] for key in KEPT_META if key in meta}
    weights = OrderedDict()
    weights._metadata = state._metadata
    for key, tensor in state.items():  # a copy of each: a view would take its whole storage along
        weights[key] = tensor.detach().cpu().clone().contiguous()
    return {"meta": {**kept, "mrla_mm_version": __version__}, "state_dict": weights}


def save_published(checkpoint: Mapping, folder: str | Path, stem: str) -> Path:
    """Write `<stem>-<eight digits of its SHA-256>.pth` by `write_atomically`; return its path."""
    buffer = io.BytesIO()  # torch.save stores a file's name in it, which would change the hash
    torch.save(dict(checkpoint), buffer)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    path = Path(folder) / f"{stem}-{digest[:8]}.pth"
    write_atomically(path, buffer.getbuffer())
    return path


def stem_of(path: str | Path) -> str:
    """Return the name of a weight file without its suffix and without an earlier hash."""
    name = Path(path).name
    return NAMED_DIGEST.sub("", name) if NAMED_DIGEST.search(name) else Path(name).stem


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
    metadata = nn.ModuleDict({"backbone": backbone}).state_dict()._metadata
    weights._metadata = metadata if any(ATTENTION in key for key in used) else OrderedDict()
    left_out = [key for key in report.outside if key not in head]
    left_out += report.keys[Fate.NO_SUCH_PART]
    stem = stem or f"{stem_of(location)}-mrla_mm"
    return save_published(pack(weights, report.meta), folder, stem), report, left_out
