"""Checks, before a run, that the weights a config asks for are there, whole and safe to load."""

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmengine.config import Config

from mrla_mm.arguments import argument_defaults, class_of, type_name
from mrla_mm.errors import InputError
from mrla_mm.weights.files import check_looks, read_checkpoint
from mrla_mm.weights.states import find_state

COUNTING_FROM_0 = ("EfficientNet", "PVTv2")  # with frozen_stages=0 nothing is frozen; elsewhere the stem is
INITIALIZERS = ("Pretrained", "PretrainedInit", "StrictPretrained")  # a registered name, and the classes behind it
UNRESTRICTED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch's own
WHOLE = {  # what a user names a whole checkpoint by, and what to do without it
    "load_from": "set load_from=None",
    "--resume": "continue from another one",
    "checkpoint": "give another file",
}


def check_checkpoint(cfg: Config, *, training: bool = True) -> None:
    """Read the checkpoint that a run tests, resumes or starts from.

    Raises:
        InputError: it is missing, damaged, unsafe or no checkpoint, or cannot be fetched. Names it as the user did.
    """
    if cfg.get("load_from"):
        key = named_by(training=training, resuming=cfg.get("resume"))
        check_location(cfg.load_from, key=key, remedy=WHOLE[key])


def named_by(*, training: bool, resuming: bool) -> str:
    """Return what a user names the checkpoint of a run by, one of `WHOLE`."""
    return ("--resume" if resuming else "load_from") if training else "checkpoint"


def check_weights(cfg: Config) -> None:
    """Fetch and read every weight file a model starts from, and warn of frozen layers that start from none.

    Raises:
        InputError: a file is missing, damaged, unsafe or cannot be fetched; see `read_checkpoint`. Says what to do.
    """
    resuming, scope = cfg.get("resume") and cfg.get("load_from"), cfg.get("default_scope")
    found = list(pretrained_locations(cfg.get("model") or {}))
    if not resuming:
        for key, location in found:
            options = from_scratch(key, cfg.model.get("backbone") or {}, scope)
            check_location(location, key=key, remedy=f"start without these weights: --cfg-options {options}")
    if not cfg.get("load_from"):
        warn_of_frozen_random_layers(cfg.get("model") or {}, scope)


def from_scratch(key: str, backbone: object, scope: str | None) -> str:
    """Options that train without the weights that a key names; a backbone without them must not be frozen."""
    parts = frozen_parts(backbone, scope) if key == "model.backbone.init_cfg" else {}
    return " ".join([f"{key}=None", *parts.values()])


def frozen_parts(backbone: object, scope: str | None) -> dict[str, str]:
    """What a backbone's config keeps from learning, and the option that lets it learn.

    mmdet's ResNets evaluate their norms unless they are told not to. Group norm has no statistics to keep.
    """
    if not isinstance(backbone, Mapping):  # of a detector of the user's own, with several for example
        return {}
    frozen, nothing = {}, 0 if type_name(backbone.get("type")).endswith(COUNTING_FROM_0) else -1
    if isinstance(stages := backbone.get("frozen_stages"), int) and stages > nothing:
        frozen[f"frozen_stages={stages}"] = f"model.backbone.frozen_stages={nothing}"
    norm = backbone.get("norm_cfg")
    grouped = isinstance(norm, Mapping) and type_name(norm.get("type")) == "GN"
    if not grouped and backbone.get("norm_eval", defaults_of(backbone, scope).get("norm_eval")):
        frozen["norm_eval=True"] = "model.backbone.norm_eval=False"
    return frozen


def defaults_of(part: Mapping, scope: str | None) -> dict[str, object]:
    """Return what a part of a model takes where its config does not say; nothing for a class that is not known."""
    kind = class_of(part, scope)
    return argument_defaults(kind) if isinstance(kind, type) else {}


def loads_file(node: Mapping) -> bool:
    """Whether a part of a config is an `init_cfg` that loads a weight file."""
    return type_name(node.get("type")) in INITIALIZERS and bool(node.get("checkpoint"))


def without_pretrained(node: object) -> object:
    """Copy of a model config that starts from no weight file, for a run whose checkpoint has all weights."""
    if isinstance(node, Mapping):
        if loads_file(node):
            return None
        named = node.get("pretrained")
        kept = {key: without_pretrained(value) for key, value in node.items()}
        return type(node)(kept | {"pretrained": None} if isinstance(named, str) else kept)
    if isinstance(node, list | tuple):
        return type(node)(item for old in node if (item := without_pretrained(old)) is not None or old is None)
    return node


def pretrained_locations(node: object, path: str = "model") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of every `init_cfg` or `pretrained` of a model config that loads a file, and the file."""
    if isinstance(node, Mapping):
        if loads_file(node):
            yield path, node["checkpoint"]
            return
        for key, value in node.items():
            if key == "pretrained" and isinstance(value, str):
                yield f"{path}.{key}", value
            else:
                yield from pretrained_locations(value, f"{path}.{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from pretrained_locations(value, f"{path}.{index}")


def check_location(location: str, *, key: str, remedy: str) -> None:
    """Raise InputError unless the weights at a location can be read; what has to be fetched is fetched here.

    Folders of FSDP hold a file for each process, which no other can read: they are looked at from outside.
    """
    try:
        if key in ("load_from", "--resume") and (files := sorted(Path(str(location)).glob("rank*.pth"))):
            for file in files:
                check_looks(file, str(file))
            if not os.environ.get(UNRESTRICTED):
                raise InputError(
                    f"folder {location} holds FSDP's parts of tensors, which torch's restricted unpickler refuses. If "
                    f"you trust whoever wrote it, continue with {UNRESTRICTED}=1 in the environment"
                )
            return
        content = read_checkpoint(location)
        if key in WHOLE:
            check_content(content, location)
    except InputError as error:
        raise InputError(f"{key}: {error}; or {remedy}") from error


def check_content(content: Mapping, location: str) -> None:
    """Raise InputError if what a file holds has no tensor in any of the places where weights may be."""
    try:
        find_state(content)
    except InputError as error:
        raise InputError(f"weights {location}: {error}") from error


def warn_of_frozen_random_layers(model: Mapping, scope: str | None) -> None:
    """Warn of a backbone with frozen stages or statistics and no pretrained weights: it would never learn."""
    backbone = model.get("backbone") or {}
    if any(pretrained_locations(model.get("backbone") or {}, "backbone")) or model.get("pretrained"):
        return
    frozen = frozen_parts(backbone, scope)
    if frozen:
        warnings.warn(
            f"THE BACKBONE STARTS FROM RANDOM WEIGHTS, YET {' AND '.join(frozen)} KEEPS PART OF IT AS IT IS: these "
            "layers will never learn. Give pretrained weights (model.backbone.init_cfg or load_from), or train them: "
            f"--cfg-options {' '.join(frozen.values())}",
            stacklevel=2,
        )
