"""Published and converted checkpoints: weights and plain metadata alone, the file's SHA-256 in its name."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mrla_mm.errors import InputError
from mrla_mm.version import __version__
from mrla_mm.weights.files import NAMED_DIGEST, read_checkpoint
from mrla_mm.weights.layouts import ATTENTION, layout_of
from mrla_mm.weights.loading import LoadReport, load_weights
from mrla_mm.weights.states import (
    BACKBONE,
    enter,
    find_state,
    sample,
    trained_attention,
    type_name,
    unwrap,
)

KEPT = (
    "epoch",
    "iter",
    "experiment_name",
    "mmengine_version",
    "dataset_meta",
    "cfg",
)  # of a checkpoint's metadata


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


def pack(
    state: Mapping[str, Tensor], checkpoint: Mapping, attention: Mapping | None = None
) -> dict:
    """Return a checkpoint of these weights with another's plain metadata and its layer attention."""
    found = checkpoint.get("meta")
    meta = (
        {key: plain(found[key]) for key in KEPT if key in found}
        if isinstance(found, Mapping)
        else {}
    )
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
    buffer = (
        io.BytesIO()
    )  # a name given to torch.save would be stored in the file and change its hash
    torch.save(dict(checkpoint), buffer)
    path = Path(folder) / f"{stem}-{hashlib.sha256(buffer.getbuffer()).hexdigest()[:8]}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(buffer.getbuffer())
    part.replace(path)
    return path


def stem_of(path: str | Path) -> str:
    """Return the name of a weight file without its suffix and without the hash of an earlier publication."""
    name = Path(path).name
    return NAMED_DIGEST.sub("", name) if NAMED_DIGEST.search(name) else Path(name).stem


def convert(
    location: str | Path,
    backbone: nn.Module,
    *,
    target: str,
    folder: str | Path,
    stem: str | None = None,
    prefix: str | None = None,
    entry: str | None = None,
) -> tuple[Path, LoadReport, list[str]]:
    """Convert a weight file for a backbone; return the new file, how it loaded, and the keys that were left out.

    A classifier's head goes along; other parts of a model have no place in either layout.
    `location`, `prefix` and `entry` are those of `load_weights`, the backbone is freshly built, and
    the target is "mrla_mm" for our names, `backbone.` before them, or "release" for those of the
    authors' code. `stem` is the new file's name before its hash, by default the old one's and the
    target.

    Raises:
        InputError: the file does not fit the backbone, or the authors' layout has no such model.
    """
    report = load_weights(backbone, location, prefix=prefix, entry=entry)
    checkpoint = read_checkpoint(location)
    source, layout = find_state(checkpoint, prefix=prefix, entry=entry), layout_of(backbone)
    state, head = layout.to_ours(source.state)
    state = {key: tensor for key, tensor in state.items() if key not in report.unused}
    head |= {
        key: value
        for key, value in source.heads.items()
        if key.startswith(tuple(layout.heads) or ("head.",))
    }
    left_out = [key for key in source.heads if key not in head] + report.unused
    attention = (
        getattr(backbone, "layer_attention", None)
        if any(ATTENTION in key for key in state)
        else None
    )
    if target == "release":
        names = layout.to_release(state, head, attention and type_name(attention["type"]))
    else:
        names = {f"{BACKBONE}{key}": tensor for key, tensor in state.items()} | head
    packed = pack(names, checkpoint, attention)
    packed[layout.entry if target == "release" else "state_dict"] = packed.pop("state_dict")
    path = save_published(packed, folder, stem or f"{stem_of(location)}-{target}")
    written = find_state(read_checkpoint(path))
    found, heads = layout.to_ours(written.state)
    found |= heads | written.heads
    differing = [
        k
        for k, tensor in (state | head).items()
        if k not in found or not torch.equal(tensor, found[k])
    ]
    if differing:
        path.unlink()
        raise InputError(
            f"{path} does not hold what the original does and was removed; differing: {sample(differing)}"
        )
    return path, report, left_out
