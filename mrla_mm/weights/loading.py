"""Strict loading: everything that should match must, and a table says what did."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from mrla_mm.errors import InputError
from mrla_mm.weights.declarations import WeightDeclarations, declarations_of
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.layouts import ATTENTION
from mrla_mm.weights.states import BACKBONE, find_state, preview, strip_prefix

COUNTER = "num_batches_tracked"  # which old files lack
OPTIONAL = {COUNTER, "conv_offset"}  # the offsets of deformable convolutions
RANDOM_START = (
    "PLAIN WEIGHTS, BUT LAYER ATTENTION DOES NOT START AS AN IDENTITY: with "
    "zero_init_attention=False, or norms without a weight, each block's output gets random values "
    "added and the pretrained features are lost. Set model.backbone.zero_init_attention=True or, "
    "with KCLA, start from weights that have it"
)


@dataclass
class LoadReport:
    """What became of every key of a file and of the model it was loaded into."""

    target: str  # the model's class
    location: str  # the file, as the user named it
    origin: str  # the entry and prefix the weights had in it
    matched: list[str] = field(default_factory=list)
    new_attention: list[str] = field(default_factory=list)  # which a plain file lacks
    allowed_missing: list[str] = field(default_factory=list)  # what else a file may lack
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # of the model's parts, not in the model
    no_such_part: list[str] = field(default_factory=list)  # of parts that the model does not have
    outside_backbone: list[str] = field(default_factory=list)  # such as a detector's heads
    mismatched: list[str] = field(default_factory=list)  # of another shape
    unusable: list[str] = field(default_factory=list)  # NaN, infinity, or no floating-point numbers
    changed_arguments: list[str] = field(default_factory=list)  # modules of layer attention
    resized: list[str] = field(default_factory=list)  # positional embeddings
    details: dict[str, str] = field(default_factory=dict)  # what to say of keys of the last four
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    meta: Mapping = field(default_factory=dict)  # what the file says of its training

    def log(self) -> None:
        """Write the table and the warnings into the run's log."""
        print_log(self.table(), logger="current")
        for warning in self.warnings:
            print_log(warning, logger="current", level=logging.WARNING)

    def table(self) -> str:
        """Return the report as a table."""
        rows = {
            "matched": self.matched,
            "missing, as expected": self.new_attention,
            "missing, allowed": self.allowed_missing,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "shape mismatch": self.mismatched,
            "unusable values": self.unusable,
            "other arguments": self.changed_arguments,
            "pos. embedding resized": self.resized,
            "dropped: heads": self.outside_backbone,
            "dropped: no such part": self.no_such_part,
        }
        lines = [f"{self.target} loads {self.location} ({self.origin})"]
        for name, keys in rows.items():
            lines.append(f"  {name:<24}{len(keys):>5}  {self.detailed(keys)}".rstrip())
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def detailed(self, keys: list[str], count: int = 3) -> str:
        """Return the first keys, each with its details, and how many there are."""
        shown = [f"{key} {self.details.get(key, '')}".strip() for key in keys]
        return preview(shown, count) if keys else ""

    def require_all(self) -> None:
        """Count as faults what a whole model may not lack or leave out, unlike a backbone."""
        self.missing += self.new_attention
        self.missing += [key for key in self.allowed_missing if not key.endswith(COUNTER)]
        self.new_attention = []
        self.allowed_missing = [key for key in self.allowed_missing if key.endswith(COUNTER)]
        self.unexpected += self.no_such_part
        self.no_such_part = []

    def faults(self, prefix: str = "") -> list[str]:
        """Return in words what should have matched below a prefix and did not."""
        kinds = {
            "keys of the model are not in the file": self.missing,
            "keys of the file are not in the model": self.unexpected,
            "tensors have another shape": self.mismatched,
            "tensors have values that the model cannot use, such as NaN": self.unusable,
            "modules were trained with other arguments": self.changed_arguments,
        }
        found = []
        for words, keys in kinds.items():
            keys = [key for key in keys if key.startswith(prefix)]
            if keys:
                found.append(f"{len(keys)} {words}: {self.detailed(keys, 2)}")
        return found

    def refusal(self, faults: list[str]) -> InputError:
        """Return the error for a file that does not fit, with what it probably is."""
        reason = "It is of another depth, width, attention or model, or needs prefix= in init_cfg"
        if not self.faults(BACKBONE) and any(key.startswith(BACKBONE) for key in self.matched):
            reason = "The backbone matches: name the file as model.backbone.init_cfg to train on it"
        return InputError(
            f"weights {self.location} ({self.origin}) do not fit {self.target}, nothing was "
            f"loaded: {len(self.matched)} tensors match; "
            f"{'; '.join(faults) or 'nothing matches'}. {reason}"
        )


def load_weights(
    module: nn.Module,
    location: str | Path,
    *,
    prefix: str | None = None,
    entry: str | None = None,
    strict: bool = True,
    checkpoint: Mapping | None = None,
) -> LoadReport:
    """Load a weight file into a backbone or a whole model: all that should match, or nothing.

    A backbone of ours may have layer attention that a plain file lacks, and ignores what the file
    has besides it. Any other module is a whole model, which must match entirely.

    Args:
        module: backbone or model.
        location: path, URL or `catalogue://name`; see `read_checkpoint`.
        prefix: prefix of the module's keys in the file; see `find_state`.
        entry: entry of the file to take; see `find_state`.
        strict: refuse a file of which something does not match; else load what does.
        checkpoint: what the file holds, if it has been read.

    Raises:
        InputError: the file cannot be used; names the first keys that do not match.
    """
    checkpoint = checkpoint or read_checkpoint(location)
    whole = not isinstance(module, WeightDeclarations)
    if whole and prefix is None:
        prefix = ""
    try:
        source = find_state(checkpoint, entry=entry, prefix=prefix)
    except InputError as error:
        raise InputError(f"weights {location}: {error}") from error
    report, loadable = match(module, source.state, location=str(location), origin=source.origin)
    report.outside_backbone += source.others
    report.meta = checkpoint.get("meta") or {}
    if whole:
        report.require_all()
    faults = report.faults()
    if not report.matched or (strict and faults):
        raise report.refusal(faults)
    report.warnings += declarations_of(module).published_layout().doubts(module, source.state)
    module.load_state_dict(loadable, strict=False)
    return report


def match(
    module: nn.Module, state: Mapping[str, Tensor], *, location: str, origin: str
) -> tuple[LoadReport, dict[str, Tensor]]:
    """Compare a state dict with a backbone or a model; return the report and what can be loaded."""
    report = LoadReport(type(module).__name__, location, origin)
    report.details = changed_arguments(module, getattr(state, "_metadata", {}))
    report.changed_arguments = list(report.details)
    declared = declarations_of(module)
    state, head = by_our_names(module, state)
    report.outside_backbone += head
    own = module.state_dict()
    parts = {key.partition(".")[0] for key in (*own, *declared.published_layout().prefixes)}
    loadable = {}
    for key, tensor in state.items():
        if key not in own:
            has_part = key.partition(".")[0] in parts and not key.startswith(declared.unbuilt_parts)
            (report.unexpected if has_part else report.no_such_part).append(key)
        elif not is_usable(tensor, own[key]):
            report.unusable.append(key)
            report.details[key] = f"({tensor.dtype})"
        elif tensor.shape == own[key].shape:
            loadable[key] = tensor
        elif fits_resized(module, key, tensor):
            loadable[key] = tensor
            report.resized.append(key)
        else:
            report.mismatched.append(key)
    for key in (*report.resized, *report.mismatched):
        shape, own_shape = tuple(state[key].shape), tuple(own[key].shape)
        report.details[key] = f"{shape} in the file, {own_shape} in the model"
    report.matched = list(loadable)
    optional = OPTIONAL | plugin_names(module)
    plain = not any(ATTENTION in key for key in state)
    for key in [key for key in own if key not in state]:
        if plain and ATTENTION in key:
            report.new_attention.append(key)
        elif optional.intersection(key.split(".")) or key.startswith(declared.optional_parts):
            report.allowed_missing.append(key)
        else:
            report.missing.append(key)
    if report.new_attention:
        norm_weights = [own[key] for key in report.new_attention if key.endswith("norm.weight")]
        if norm_weights and not any(weight.any() for weight in norm_weights):
            report.notes.append("plain weights: layer attention starts as an exact identity")
        else:
            report.warnings.append(RANDOM_START)
    return report, loadable


def changed_arguments(module: nn.Module, metadata: Mapping) -> dict[str, str]:
    """Return, by module, which arguments are others in a state dict's metadata."""
    changed = {}
    for path, part in module.named_modules():
        compare = getattr(part, "changed_arguments", None)
        if compare and (words := compare(metadata.get(path, {}))):
            changed[path] = f"({words})"
    return changed


def by_our_names(module: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict, dict]:
    """Return the tensors of a backbone or a model by our names, and those of a published head."""
    if isinstance(module, WeightDeclarations):
        return module.published_layout().split(state)
    layout = declarations_of(getattr(module, "backbone", None)).published_layout()
    backbone = layout.renamed(strip_prefix(state, BACKBONE))
    others = {key: value for key, value in state.items() if not key.startswith(BACKBONE)}
    return {f"{BACKBONE}{key}": value for key, value in backbone.items()} | others, {}


def is_usable(tensor: Tensor, own: Tensor) -> bool:
    """Whether a model can compute with a tensor of a file in place of its own."""
    if not own.is_floating_point():
        if own.dim() == 0 and tensor.is_floating_point():  # a counter, averaged with the weights
            return bool(torch.isfinite(tensor).all())
        return not (tensor.is_floating_point() or tensor.is_complex())
    plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta
    return plain and bool(torch.isfinite(tensor.to(own.dtype)).all())


def fits_resized(module: nn.Module, key: str, tensor: Tensor) -> bool:
    """Whether a tensor is a positional embedding that mmpretrain's transformers resize."""
    parent, _, name = key.rpartition(".")
    owner = module.get_submodule(parent)
    if name != "pos_embed" or not hasattr(owner, "_prepare_pos_embed"):
        return False
    state = {name: tensor}
    try:
        owner._prepare_pos_embed(state, "")
    except Exception:  # for shapes that it cannot resize, of many types
        return False
    return state[name].shape == owner.pos_embed.shape


def plugin_names(module: nn.Module) -> set[str]:
    """Return the names of the plugins in mmdet's ResNet blocks, which no published file has."""
    found = set()
    for block in module.modules():
        for number in (1, 2, 3):
            found.update(getattr(block, f"after_conv{number}_plugin_names", ()))
    return found
