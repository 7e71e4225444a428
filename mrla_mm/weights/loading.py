"""Loading into a backbone of this package: everything that should match must, and one table says what did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mrla_mm.errors import InputError
from mrla_mm.weights.efficientnet import torchvision_doubts
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.layouts import ATTENTION, LAYOUTS, KeyLayout
from mrla_mm.weights.provenance import compare_attention, trained_attention
from mrla_mm.weights.states import BACKBONE, by_part, find_state, sample

# What a file may lack: counters that old files do not have, and offsets of deformable convolutions.
OPTIONAL = {"num_batches_tracked", "conv_offset"}


@dataclass
class LoadReport:
    """What became of every key of a file and of the model it was loaded into.

    Attributes:
        target: the model's class.
        location: the file, as it was named.
        origin: the entry and prefix the weights had in it.
        matched: keys that were loaded.
        fresh: keys of layer attention that a plain file cannot have.
        additional: other keys that the file need not have.
        missing: keys that should have been in the file.
        unexpected: keys of the file that the model's parts do not have.
        unused: keys of the file for parts that the model does not have.
        heads: keys of the file for classifiers and other parts outside the backbone.
        mismatched: keys with the shapes they have in the file and in the model.
        unusable: keys of tensors without numbers for the model, with the reason.
        resized: keys of positional embeddings with both shapes.
        notes: what else the user should know.
    """

    target: str
    location: str
    origin: str
    matched: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    additional: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return the report as a table."""
        rows = [
            ("matched", len(self.matched), ""),
            ("missing, as expected", len(self.fresh), sample(self.fresh) if self.fresh else ""),
            ("missing, allowed", len(self.additional), sample(self.additional) if self.additional else ""),
            ("missing", len(self.missing), sample(self.missing) if self.missing else ""),
            ("unexpected", len(self.unexpected), sample(self.unexpected) if self.unexpected else ""),
            ("shape mismatch", len(self.mismatched), sample(self.mismatched) if self.mismatched else ""),
            *([("no usable numbers", len(self.unusable), sample(self.unusable))] if self.unusable else []),
            ("pos. embedding resized", len(self.resized), sample(self.resized) if self.resized else ""),
            ("dropped: heads", len(self.heads), by_part(self.heads)),
            ("dropped: no such part", len(self.unused), by_part(self.unused)),
        ]
        lines = [f"  {name:<24}{count:>5}  {detail}".rstrip() for name, count, detail in rows]
        head = f"{self.target} loads {self.location} ({self.origin})"
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])

    def faults(self, prefix: str = "") -> list[str]:
        """Return what should have matched and did not, in words; of the keys below a prefix only."""
        kinds = {
            "keys of the model are not in the file": self.missing,
            "keys of the file are not in the model": self.unexpected,
            "tensors have another shape": self.mismatched,
            "tensors have no numbers that the model could use": self.unusable,
        }
        below = {words: [key for key in keys if key.startswith(prefix)] for words, keys in kinds.items()}
        return [f"{len(keys)} {words}: {sample(keys, 2)}" for words, keys in below.items() if keys]


def load_weights(
    module: nn.Module,
    location: str | Path,
    *,
    prefix: str | None = None,
    entry: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load the weights at a location into a backbone: all that should match, or nothing.

    Args:
        module: the backbone.
        location: path, URL or `catalogue://name`; see `read_checkpoint`.
        prefix: prefix of the backbone's keys in the file; see `find_state`.
        entry: entry of the file to take; see `find_state`.
        strict: refuse a file of which something does not match; else load what does.

    Raises:
        InputError: the file cannot be used; names the first keys of both sides if they do not match.
    """
    checkpoint = read_checkpoint(location)
    try:
        source = find_state(checkpoint, entry=entry, prefix=prefix)
    except InputError as error:
        raise InputError(f"weights {location}: {error}") from error
    layout = layout_of(module)
    state, head = layout.to_ours(source.state)
    report = LoadReport(type(module).__name__, str(location), source.origin, heads=[*source.heads, *head])
    others = {layout.our_name(key): value for key, value in source.others.items()}
    loadable = match(module, state, report, trunk=layout.trunk, others=others)
    differences = compare_attention(module, trained_attention(checkpoint))
    faults = [*report.faults(), *differences]
    if not report.matched or (strict and faults):
        hint = (
            "; to load only what matches, set strict=False beside the checkpoint" if report.matched and strict else ""
        )
        raise InputError(explain(module, source.state, report, faults) + hint)
    report.notes += [*differences, *doubts(module, layout, source.state)]
    module.load_state_dict(loadable, strict=False)
    return report


def doubts(module: nn.Module, layout: KeyLayout, state: Mapping[str, Tensor]) -> list[str]:
    """Return what a file that matches may still be wrong about, in words.

    The authors' base ResNets have heads of 16 channels; torchvision's EfficientNets pad unlike mmdet's.
    """
    if layout.trunk is not None and any(key.startswith(f"{layout.trunk}.") for key in state):
        return torchvision_doubts(module)
    width = (getattr(module, "layer_attention", None) or {}).get("head_channels", 32)
    if layout.base_stages and any(key.startswith("stages.") for key in state) and width != 16:
        return [
            "the authors' code trains ResNet MRLA-base with heads of 16 channels, and shapes do not tell: this model "
            f"has head_channels={width}; set layer_attention.head_channels=16 unless the file was trained otherwise"
        ]
    return []


def layout_of(module: nn.Module) -> KeyLayout:
    """Return the key layout of a backbone's published files."""
    layout = LAYOUTS[getattr(module, "key_layout", None)]
    return layout(module) if callable(layout) else layout


def match(
    module: nn.Module,
    state: Mapping[str, Tensor],
    report: LoadReport,
    *,
    trunk: str | None = None,
    others: Mapping[str, object] | None = None,
) -> dict[str, Tensor]:
    """Compare a state dict in our names with a module, fill the report, and return what can be loaded.

    A key that still begins with the layout's `trunk` is unexpected, not one of a part that the module lacks. `others`
    are what the file holds beside tensors: a number or a text in place of a tensor of the model is no missing key.
    """
    own = module.state_dict()
    parts = {key.partition(".")[0] for key in own} | {trunk}
    unbuilt = tuple(getattr(module, "unbuilt_parts", ()))  # beginnings of keys, where part of a list is not built
    loadable = {}
    for key, tensor in state.items():
        if key not in own:
            has_part = key.partition(".")[0] in parts and not key.startswith(unbuilt)
            (report.unexpected if has_part else report.unused).append(key)
        elif reason := why_unusable(tensor, own[key]):
            report.unusable.append(f"{key} ({reason})")
        elif tensor.shape == own[key].shape:
            loadable[key] = tensor
        elif fits_resized(module, key, tensor):
            loadable[key] = tensor
            report.resized.append(f"{key} {tuple(tensor.shape)} to {tuple(own[key].shape)}")
        else:
            report.mismatched.append(f"{key} {tuple(tensor.shape)} in the file, {tuple(own[key].shape)} in the model")
    report.matched = list(loadable)
    note_missing(module, state, others or {}, report)
    if report.fresh:
        start = "as an exact identity" if is_identity(module) else "from random weights"
        report.notes.append(f"plain weights: layer attention starts {start}")
    return loadable


def note_missing(
    module: nn.Module, state: Mapping[str, Tensor], others: Mapping[str, object], report: LoadReport
) -> None:
    """Enter what a module has and a state dict lacks into the report; see `match` for the arguments."""
    optional = OPTIONAL | plugin_names(module)
    plain = not any(ATTENTION in key for key in state)
    for key in module.state_dict():
        if key in state:
            continue
        if key in others:
            report.unusable.append(f"{key} (it is no tensor but {type(others[key]).__name__})")
        elif plain and ATTENTION in key:
            report.fresh.append(key)
        elif optional.intersection(key.split(".")):
            report.additional.append(key)
        else:
            report.missing.append(key)


def why_unusable(tensor: Tensor, own: Tensor) -> str | None:
    """Return why the model could not compute with a tensor of a file in place of its own, or None."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return "it is " + ("empty, of torch's meta device" if tensor.is_meta else "sparse or quantised")
    if tensor.is_complex() or (own.is_floating_point() and not tensor.is_floating_point()):
        return f"it is {tensor.dtype}"
    dtype = own.dtype if own.is_floating_point() else torch.float32
    if tensor.is_floating_point() and not torch.isfinite(tensor.to(dtype)).all():
        return f"it holds NaN, infinity or numbers too large for {dtype}"
    return None


def fits_resized(module: nn.Module, key: str, tensor: Tensor) -> bool:
    """Whether a tensor is a positional embedding that mmpretrain's transformers resize to theirs when they load it."""
    parent, _, name = key.rpartition(".")
    owner = module.get_submodule(parent)
    prepare = getattr(owner, "_prepare_pos_embed", None)
    if name != "pos_embed" or prepare is None:
        return False
    state = {name: tensor}
    try:
        prepare(state, "")
    except (AssertionError, RuntimeError, ValueError):
        return False
    return state[name].shape == owner.pos_embed.shape


def plugin_names(module: nn.Module) -> set[str]:
    """Return the names of the plugins that mmdet's ResNet adds to its blocks, which no published file has."""
    return {
        name
        for block in module.modules()
        for position in ("after_conv1", "after_conv2", "after_conv3")
        for name in getattr(block, f"{position}_plugin_names", ())
    }


def is_identity(module: nn.Module) -> bool:
    """Whether every branch of layer attention scales its output by zero, so that plain weights keep their meaning."""
    own = module.state_dict().items()
    scales = [value for key, value in own if ATTENTION in key and key.endswith("norm.weight")]
    return bool(scales) and not any(torch.count_nonzero(scale) for scale in scales)


def explain(module: nn.Module, state: Mapping, report: LoadReport, faults: list[str]) -> str:
    """Return the message for a file that does not fit: what differs, the likely reason, and what to do."""
    return (
        f"weights {report.location} ({report.origin}) do not fit {report.target}, nothing was loaded: "
        f"{misfit(module, state, report, faults)}. Choose the file of this architecture, or make the model like the "
        "file's"
    )


def misfit(module: nn.Module, state: Mapping, report: LoadReport, faults: list[str]) -> str:
    """Return how much of a file matches a module, the faults, and what the file probably is instead."""
    total = len(module.state_dict())
    words = f"{len(report.matched)} of the model's {total} tensors match; {'; '.join(faults) or 'nothing matches'}"
    return f"{words}. {likely_reason(module, state, report)}"


def likely_reason(module: nn.Module, state: Mapping, report: LoadReport) -> str:
    """Return what a file that does not fit probably is, judged by what does not match."""
    own = module.state_dict()
    wrong = [*report.missing, *report.unexpected, *report.mismatched]
    if not report.matched:
        first, ours = next(iter(state), None), next(iter(own))
        return f"It is of another kind of model: its first key is {first}, the model's {ours}"
    if report.unusable and not wrong:
        return "The file is damaged, or was saved in another number format"
    trunk = BACKBONE if any(key.startswith(BACKBONE) for key in own) else ""
    attention = {key for key in own if ATTENTION in key}
    others = [key for key in (*report.missing, *report.mismatched) if ATTENTION not in key and key.startswith(trunk)]
    if attention and attention <= {*report.missing, *report.fresh} and not others:
        return f"The file has no layer attention (keys with {ATTENTION} in them): it is of a plain model"
    if all(ATTENTION in key for key in wrong):
        return "Only layer attention differs: another variant, other arguments of it, or none"
    if trunk and not any(key.startswith(trunk) for key in wrong):
        if any(key.startswith("head.") for key in report.unexpected):
            return (
                "It is a classifier: its backbone is for model.backbone.init_cfg.checkpoint, to start a training from"
            )
        return "The backbone matches: probably the heads are another detector's, or for another number of classes"
    if not report.missing and not report.unexpected:
        return "All names match: probably the file's model is of another width"
    return "Probably it is of another depth or another model"
