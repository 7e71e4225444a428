"""Published checkpoints: weights and plain metadata alone, the file's SHA-256 in its name and in a file beside it."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.version import __version__
from mrla_mm.weights.atomic import write_atomically
from mrla_mm.weights.files import NAMED_DIGEST, sidecar_of
from mrla_mm.weights.provenance import trained_attention
from mrla_mm.weights.states import enter, sample, unwrap

KEPT = ("epoch", "iter", "experiment_name", "mmengine_version", "dataset_meta", "cfg")  # of a checkpoint's metadata


def publishable(checkpoint: Mapping) -> tuple[dict, list[str]]:
    """Return what of a training checkpoint others need, and the names of the entries that stay behind.

    Kept are the weights and what they were trained on and with; the optimizer, schedules, log history and hooks'
    states go, and of a model and its average the one that mmengine evaluates stays.

    Raises:
        InputError: the checkpoint holds no weights.
    """
    content, entries = enter(checkpoint, None)
    state, _, _ = unwrap(content)
    if not state:
        raise InputError(f"there is no tensor to publish among {sample(content)}")
    others = [str(key) for key, value in checkpoint.items() if not isinstance(value, Tensor)]
    return pack(state, checkpoint), [name for name in others if name not in (*entries, "meta")]


def pack(state: Mapping[str, Tensor], checkpoint: Mapping, attention: Mapping | None = None) -> dict:
    """Return a checkpoint of these weights with what is plain in another's metadata, and its layer attention.

    Tensors are copied, so that a part of a larger storage does not take the whole of it along.
    """
    found = checkpoint.get("meta")
    meta = {key: plain(found[key]) for key in KEPT if key in found} if isinstance(found, Mapping) else {}
    attention = attention or trained_attention(checkpoint)
    if attention is not None:
        meta["layer_attention"] = plain(attention)
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
    if isinstance(value, type):
        return value.__name__
    return plain(value.item()) if hasattr(value, "item") and getattr(value, "size", 0) == 1 else str(value)


def save_published(checkpoint: Mapping, folder: str | Path, stem: str) -> Path:
    """Write a checkpoint as `<stem>-<first 8 digits of its SHA-256>.pth` with its sidecar; return its path.

    Raises:
        InputError: the folder cannot be made, or the disk is full.
    """
    buffer = io.BytesIO()  # a name given to torch.save would be stored in the file and change its hash
    torch.save(dict(checkpoint), buffer)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    path = Path(folder) / f"{stem}-{digest[:8]}.pth"
    write_atomically(path, buffer.getbuffer())
    write_atomically(sidecar_of(path), f"{digest}  {path.name}\n".encode())
    return path


def stem_of(path: str | Path) -> str:
    """Return the name of a weight file without its suffix and without the hash of an earlier publication."""
    name = Path(path).name
    return NAMED_DIGEST.sub("", name) if NAMED_DIGEST.search(name) else Path(name).stem
