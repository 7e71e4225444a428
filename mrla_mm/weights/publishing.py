"""Published checkpoints: weights and plain metadata alone, the file's SHA-256 in its name."""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.version import __version__
from mrla_mm.weights.files import NAMED_DIGEST
from mrla_mm.weights.provenance import trained_attention
from mrla_mm.weights.states import enter, sample, unwrap

KEPT = ("epoch", "iter", "experiment_name", "mmengine_version", "dataset_meta", "cfg")  # of a checkpoint's metadata


def publishable(checkpoint: Mapping) -> tuple[dict, list[str]]:
    """Return what of a training checkpoint others need, and the names of the entries that stay behind.

    Of a model and its average, the one that mmengine evaluates stays.

    Raises:
        InputError: the checkpoint holds no weights.
    """
    content, entries = enter(checkpoint, None)
    state, _ = unwrap(content)
    if not state:
        raise InputError(f"there is no tensor to publish among {sample(content)}")
    others = [str(key) for key, value in checkpoint.items() if not isinstance(value, Tensor)]
    return pack(state, checkpoint), [name for name in others if name not in (*entries, "meta")]


def pack(state: Mapping[str, Tensor], checkpoint: Mapping, attention: Mapping | None = None) -> dict:
    """Return a checkpoint of these weights with another's plain metadata and its layer attention."""
    found = checkpoint.get("meta")
    meta = {key: plain(found[key]) for key in KEPT if key in found} if isinstance(found, Mapping) else {}
    if attention := attention or trained_attention(checkpoint):
        meta["layer_attention"] = plain(attention)
    # A copy of each tensor: a view would take its whole storage along.
    weights = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in state.items()}
    return {"meta": {**meta, "mrla_mm_version": __version__}, "state_dict": weights}


def plain(value: object) -> object:
    """Return a value as Python's own numbers, strings, lists and dicts; a class becomes its name, others their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value) in (bool, int, float, str, type(None)):
        return value
    return value.__name__ if isinstance(value, type) else str(value)


def save_published(checkpoint: Mapping, folder: str | Path, stem: str) -> Path:
    """Write a checkpoint as `<stem>-<first 8 digits of its SHA-256>.pth`, whole or not at all; return its path."""
    buffer = io.BytesIO()  # a name given to torch.save would be stored in the file and change its hash
    torch.save(dict(checkpoint), buffer)
    path = Path(folder) / f"{stem}-{hashlib.sha256(buffer.getbuffer()).hexdigest()[:8]}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def stem_of(path: str | Path) -> str:
    """Return the name of a weight file without its suffix and without the hash of an earlier publication."""
    name = Path(path).name
    return NAMED_DIGEST.sub("", name) if NAMED_DIGEST.search(name) else Path(name).stem
