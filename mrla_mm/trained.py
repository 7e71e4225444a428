"""Trained models: the model of a config with all the weights of a checkpoint, or a message that says why not."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mrla_mm import cli, weights
from mrla_mm.errors import InputError
from mrla_mm.weights import read_checkpoint
from mrla_mm.weights.provenance import trained_attention
from mrla_mm.weights.states import PREPROCESSOR, find_state


class Checkpoint(NamedTuple):
    """What a checkpoint file holds.

    Attributes:
        location: the file, as it was named.
        meta: what it says about its training, empty where it says nothing.
        state: tensors by key.
        attention: layer attention of its training, None where it does not say.
    """

    location: str
    meta: Mapping
    state: dict[str, Tensor]
    attention: Mapping | None


class Trained(NamedTuple):
    """A model in eval mode, its config, and the metadata of its checkpoint."""

    model: nn.Module
    cfg: Config
    meta: Mapping


def load_model(
    config: str, checkpoint: str | Path, *, device: str | None = None, options: Mapping[str, object] | None = None
) -> Trained:
    """Return a config's model with the weights of a checkpoint, ready to evaluate.

    Args:
        config: config file, or `package::name` of a packed one.
        checkpoint: checkpoint file; its keys must be the model's.
        device: "cpu", "cuda", ...; by default a GPU where there is one.
        options: overrides of config values by dotted name.

    Raises:
        InputError: the config has no model or none that can be built, the file is no checkpoint or that of another
            model, or the device cannot be used.
    """
    device = usable_device(device)
    return load_weights(cli.read_config(config, options or {}), config, checkpoint, device=device)


def load_weights(cfg: Config, name: str, checkpoint: str | Path, *, device: str) -> Trained:
    """Return the model of a config that has been read, as `load_model` does; messages call the config by `name`.

    Raises:
        InputError: see `load_model`.
    """
    model = build_model(cfg, name)
    weights.load_weights(model, checkpoint)
    return Trained(model.to(device).eval(), cfg, read_contents(checkpoint).meta)


def usable_device(name: str | None) -> str:
    """Return the device of a name, a GPU where there is one for None.

    Raises:
        InputError: nothing can be computed there.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def build_model(cfg: Config, name: str) -> nn.Module:
    """Return the model of a config as it starts, without weights from files.

    Args:
        cfg: the config.
        name: how messages call it.

    Raises:
        InputError: it has no model, or one that cannot be built.
    """
    if not isinstance(cfg.get("model"), Mapping):
        raise InputError(f"config {name} has no model; give that of a training")
    init_default_scope(cfg.get("default_scope") or "mmengine")
    model = copy.deepcopy(cfg.model)
    if cfg.get("data_preprocessor"):  # mmpretrain's configs have it beside the model, where mmengine's Runner looks
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    try:
        return MODELS.build(model)
    except InputError:
        raise
    except Exception as error:  # a value of the config can make a constructor raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"the model of config {name} cannot be built: {type(error).__name__}: {reason}") from error


def read_contents(location: str | Path) -> Checkpoint:
    """Read a checkpoint's metadata and the state dict in it.

    Raises:
        InputError: the file cannot be read (see `read_checkpoint`), or there is no tensor where weights should be.
    """
    contents = read_checkpoint(location)
    try:
        state = find_state(contents, prefix="").state
    except InputError as error:
        raise InputError(f"weights {location}: {error}; give a checkpoint that holds a model") from error
    state = {key: value for key, value in state.items() if not key.startswith(PREPROCESSOR)}
    meta = contents.get("meta")
    return Checkpoint(str(location), meta if isinstance(meta, Mapping) else {}, state, trained_attention(contents))
