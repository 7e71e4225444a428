"""Strict loading: everything that should match must, with a table of what did."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from mrla_mm.errors import InputError
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.layouts import ATTENTION, WeightDeclarations, declarations_of
from mrla_mm.weights.states import BACKBONE, Source, find_state, preview

COUNTER = "num_batches_tracked"  # which old files lack
OPTIONAL = {COUNTER, "conv_offset"}  # the offsets of deformable convolutions


class KeyStatus(Enum):
    """What became of a key of the file or of the model; its value is the row in the table."""

    MATCHED = "matched"
    NEW_ATTENTION = "missing, as expected"  # a plain file lacks it
    MAY_BE_MISSING = "missing, allowed"
    MISSING = "missing"
    UNEXPECTED = "unexpected"  # of a part that the model has
    MISMATCHED = "shape mismatch"
    UNUSABLE = "unusable values"  # NaN, infinity, or no floating-point numbers
    CHANGED_ARGUMENTS = "other arguments"  # of a module of layer attention, not a key
    RESIZED = "pos. embedding resized"
    OUTSIDE = "dropped: heads"
    NO_SUCH_PART = "dropped: no such part"


FAULTS = {
    KeyStatus.MISSING: "keys of the model are not in the file",
    KeyStatus.UNEXPECTED: "keys of the file are not in the model",
    KeyStatus.MISMATCHED: "tensors have another shape",
    KeyStatus.UNUSABLE: "tensors have values that the model cannot use, such as NaN",
    KeyStatus.CHANGED_ARGUMENTS: "modules were trained with other arguments",
}


@dataclass
class LoadReport:
    """What became of every key of a file and of the model it was loaded into."""

    target: str  # the model's class
    location: str  # the file, as the user named it
    origin: str  # the entry and prefix the weights had in it
    keys: dict[KeyStatus, list[str]] = field(
        default_factory=lambda: {each: [] for each in KeyStatus}
    )
    details: dict[str, str] = field(default_factory=dict)  # what to say of single keys
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    meta: Mapping = field(default_factory=dict)  # what the file says of its training
    loadable: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by the model's names
    outside: dict[str, Tensor] = field(default_factory=dict, repr=False)  # heads and the like

    def log(self) -> None:
        """Write the table and the warnings into the run's log."""
        print_log(self.table(), logger="current")
        for warning in self.warnings:
            print_log(warning, logger="current", level=logging.WARNING)

    def table(self) -> str:
        """Return the report as a table."""
        lines = [f"{self.target} loads {self.location} ({self.origin})"]
        for status, keys in self.keys.items():
            lines.append(f"  {status.value:<24}{len(keys):>5}  {self.detailed(keys)}".rstrip())
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def detailed(self, keys: list[str], count: int = 3) -> str:
        """Return the first keys, each with its details, and how many there are."""
        shown = [f"{key} {self.details.get(key, '')}".strip() for key in keys]
        return preview(shown, count) if keys else ""

    def faults(self, part: str = "") -> list[str]:
        """Return in words what should have matched, in a part wherever it is, and did not."""
        found = []
        for status, words in FAULTS.items():
            keys = [key for key in self.keys[status] if f".{part}" in f".{key}"]
            if keys:
                found.append(f"{len(keys)} {words}: {self.detailed(keys, 2)}")
        return found

    def check(self, part: str = "", *, strict: bool = True) -> None:
        """Raise an InputError if a part, by `strict`, does not fit entirely, or nothing loads."""
        faults = self.faults(part)
        if self.loadable and not (strict and faults):
            return
        matched = self.keys[KeyStatus.MATCHED]
        reason = "It is of another depth, width, attention or model, or needs prefix= in init_cfg"
        if not self.faults(BACKBONE) and any(key.startswith(BACKBONE) for key in matched):
            reason = "The backbone matches: name the file as model.backbone.init_cfg to train on it"
        raise InputError(
            f"weights {self.location} ({self.origin}) do not fit {self.target}, nothing was "
            f"loaded: {len(matched)} tensors match; "
            f"{'; '.join(faults) or 'nothing matches'}. {reason}"
        )


def load_weights(
    module: nn.Module,
    location: str | Path,
    *,
    prefix: str | None = None,
    entry: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a weight file into a backbone or a whole model: all that should match, or nothing.

    A backbone of ours may have layer attention that a plain file lacks, and ignores what the file
    has besides it. Any other module is a whole model, which must match entirely. With strict=False
    what matches is loaded. `read_checkpoint` describes the location, `find_state` prefix and entry.

    Raises:
        InputError: the file cannot be used; names the first keys that do not match.
    """
    checkpoint = read_checkpoint(location)
    exact = not isinstance(module, WeightDeclarations)
    if exact and prefix is None:
        prefix = ""
    try:
        source = find_state(checkpoint, entry=entry, prefix=prefix)
        report = match(module, source, str(location), exact=exact)
    except InputError as error:
        raise InputError(f"weights {location}: {error}") from error
    report.meta = checkpoint.get("meta") or {}
    report.check(strict=strict)
    weights = source.state if exact and not report.faults() else report.loadable
    module.load_state_dict(weights, strict=False)  # by a file's metadata mmdet's heads rename keys
    return report


def match(module: nn.Module, source: Source, location: str, *, exact: bool) -> LoadReport:
    """Compare a state dict with a backbone or a model.

    If `exact`, the file is to be the model's own: it may lack nothing but counters, and has no
    other parts.
    """
    report = LoadReport(type(module).__name__, location, source.origin)
    report.details = changed_arguments(module, source.state._metadata)
    report.keys[KeyStatus.CHANGED_ARGUMENTS] = list(report.details)
    state, head = by_our_names(module, source.state)
    report.outside = head | source.others
    report.keys[KeyStatus.OUTSIDE] = list(report.outside)
    own = module.state_dict()
    for key, tensor in state.items():
        status, report.details[key] = status_in_model(module, own, key, tensor, exact)
        report.keys[status].append(key)
        if status in (KeyStatus.MATCHED, KeyStatus.RESIZED):
            report.loadable[key] = tensor
    missing = [key for key in own if key not in state]
    optional = optional_keys(module, missing, exact)
    may_lack_attention = not exact and not any(ATTENTION in key for key in state)
    for key in missing:
        if may_lack_attention and ATTENTION in key:
            status = KeyStatus.NEW_ATTENTION
        elif key in optional:
            status = KeyStatus.MAY_BE_MISSING
        else:
            status = KeyStatus.MISSING
        report.keys[status].append(key)
    if new := report.keys[KeyStatus.NEW_ATTENTION]:
        note_start(report, [own[key] for key in new if key.endswith("norm.weight")])
    return report


def note_start(report: LoadReport, norms: Sequence[Tensor]) -> None:
    """Note that layer attention is an identity, its norms all zero, or warn that it is not."""
    if norms and not any(weight.any() for weight in norms):
        report.notes.append("plain weights: layer attention starts as an exact identity")
    else:
        report.warnings.append(
            "PLAIN WEIGHTS, BUT LAYER ATTENTION DOES NOT START AS AN IDENTITY: random values are "
            "added to the output of each block. Set model.backbone.zero_init_attention=True, or "
            "start from weights that have the attention"
        )


def status_in_model(
    module: nn.Module, own: Mapping[str, Tensor], key: str, tensor: Tensor, exact: bool
) -> tuple[KeyStatus, str]:
    """Return what becomes of a tensor of the file, with details; own is the model's state dict."""
    if key not in own:
        has_part = exact or belongs_to_part(module, own, key)
        return (KeyStatus.UNEXPECTED if has_part else KeyStatus.NO_SUCH_PART), ""
    if tensor.is_nested:  # without a shape
        return KeyStatus.UNUSABLE, "(nested)"
    status = KeyStatus.MATCHED
    shapes = ""
    if tensor.shape != own[key].shape:
        shapes = f"{tuple(tensor.shape)} in the file, {tuple(own[key].shape)} in the model"
        status = KeyStatus.RESIZED if fits_resized(module, key, tensor) else KeyStatus.MISMATCHED
    if status is not KeyStatus.MISMATCHED and not is_usable(tensor, own[key]):
        return KeyStatus.UNUSABLE, f"({tensor.dtype})"
    return status, shapes


def belongs_to_part(module: nn.Module, own: Mapping[str, Tensor], key: str) -> bool:
    """Whether a key is of a part that the model has, by our or by a published name."""
    declared = declarations_of(module)
    names = (*own, *declared.published_layout().prefixes)
    parts = {name.partition(".")[0] for name in names}
    return key.partition(".")[0] in parts and not key.startswith(declared.unbuilt_parts)


def optional_keys(module: nn.Module, keys: Sequence[str], exact: bool) -> list[str]:
    """Return which keys of a model a file may lack; see `match` for `exact`."""
    if exact:
        return [key for key in keys if key.endswith(COUNTER)]
    names = OPTIONAL | plugin_names(module)
    declared = declarations_of(module).optional_parts
    return [key for key in keys if key.startswith(declared) or names & {*key.split(".")}]


def changed_arguments(module: nn.Module, metadata: Mapping) -> dict[str, str]:
    """Return, by module, which arguments are others in a state dict's metadata."""
    changed = {}
    for path, part in module.named_modules():
        compare = getattr(part, "changed_arguments", None)
        trained = metadata.get(path) or metadata.get(path.partition(".")[2], {})  # a teacher's
        if compare and (words := compare(trained)):
            changed[path] = f"({words})"
    return changed


def by_our_names(module: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict, dict]:
    """Return the tensors of a backbone or a model by our names, and those of a published head."""
    if isinstance(module, WeightDeclarations):
        return module.published_layout().split(state)
    ours = dict(state)
    for path, part in module.named_modules():  # a teacher and a student have a backbone each
        if isinstance(part, WeightDeclarations):
            part.rename_published(ours, f"{path}.")
    return ours, {}


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
