"""Conversion of any accepted file to a clean checkpoint of ours or to the authors' layout, checked by loading it."""

import copy
from pathlib import Path

import torch
from torch import nn

from mrla_mm.errors import InputError
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.layouts import ATTENTION, layout_of
from mrla_mm.weights.loading import LoadReport, load_weights
from mrla_mm.weights.provenance import type_name
from mrla_mm.weights.publishing import pack, save_published, stem_of
from mrla_mm.weights.states import BACKBONE, find_state, sample


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

    Args:
        location: any file that `load_weights` accepts, as for `prefix` and `entry`.
        backbone: a backbone of the file's architecture, freshly built.
        target: "mrla_mm" for our names, `backbone.` before them, or "release" for those of the authors' code.
        folder: where to write.
        stem: name of the new file before its hash, by default that of the old one and the target.
        prefix: see `load_weights`.
        entry: see `load_weights`.

    Raises:
        InputError: the file does not fit the backbone, or the authors' layout has no such model.
    """
    other = copy.deepcopy(backbone)
    report = load_weights(backbone, location, prefix=prefix, entry=entry)
    checkpoint = read_checkpoint(location)
    source, layout = find_state(checkpoint, prefix=prefix, entry=entry), layout_of(backbone)
    state, head = layout.to_ours(source.state)
    state = {key: tensor for key, tensor in state.items() if key not in report.unused}
    head |= {key: value for key, value in source.heads.items() if key.startswith(tuple(layout.heads) or ("head.",))}
    left_out = [key for key in source.heads if key not in head] + report.unused
    attention = getattr(backbone, "layer_attention", None) if any(ATTENTION in key for key in state) else None
    if target == "release":
        names = layout.to_release(state, head, attention and type_name(attention["type"]))
    else:
        names = {f"{BACKBONE}{key}": tensor for key, tensor in state.items()} | head
    packed = pack(names, checkpoint, attention)
    packed[layout.entry if target == "release" else "state_dict"] = packed.pop("state_dict")
    path = save_published(packed, folder, stem or f"{stem_of(location)}-{target}")
    load_weights(other, path)
    expected, actual = backbone.state_dict(), other.state_dict()
    converted = find_state(read_checkpoint(path))
    heads = {**converted.heads, **layout.to_ours(converted.state)[1]}
    differing = [key for key in expected if not torch.equal(expected[key], actual[key])]
    differing += [key for key in head if key not in heads or not torch.equal(head[key], heads[key])]
    if differing:
        path.unlink()
        raise InputError(f"{path} does not hold what the original does and was removed; differing: {sample(differing)}")
    return path, report, left_out
