"""Reading configs: by path or `package::name`, with the overrides of --cfg-options."""

import argparse
import difflib
import inspect
import warnings
from collections.abc import Iterator, Mapping

import torch
from mmengine.config import Config, DictAction
from mmengine.runner import FlexibleRunner, Runner

from mrla_mm.compat.config_scope import find_config
from mrla_mm.errors import InputError

# Top-level keys that a config may gain: arguments of the runners, and what is read beside them.
READ = "custom_imports find_unused_parameters runner_type tta_model tta_pipeline auto_scale_lr"
TOP_LEVEL = {
    *inspect.signature(Runner).parameters,
    *inspect.signature(FlexibleRunner).parameters,
    *READ.split(),
    "activation_checkpointing",
    "model_wrapper_cfg",
    "sync_bn",
}


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cfg-options."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        default={},
        metavar="KEY=VALUE",
        help="override config values, e.g. train_dataloader.batch_size=4; lists as key=[a,b]",
    )


def device_name(name: str) -> str:
    """Return the device of a command line, or let argparse refuse a GPU where there is none."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch finds no GPU for {name}")
    return name


def read_config(name: str, options: Mapping[str, object]) -> Config:
    """Read the config of a path or `package::name` and apply overrides by dotted key.

    `data_root` moves every data set and evaluator. An override of a key that the config does not
    have is applied with a warning, since possibly nothing reads it.

    Raises:
        InputError: there is no such config, it is not a config, or `data_root` would not reach
            every data set.
    """
    path = find_config(name)
    if path.suffix not in (".py", ".json", ".yaml", ".yml"):
        raise InputError(f"{name} is not a config; the config comes first, then the checkpoint")
    cfg = Config.fromfile(path)
    options = dict(options)
    if "data_root" in options:
        move_data_root(cfg, str(options.pop("data_root")))
    for option in options:
        if line := unknown_key(cfg, option):
            warnings.warn(line, stacklevel=2)
    cfg.merge_from_dict(options)
    return cfg


def move_data_root(cfg: Config, root: str) -> None:
    """Point every data set and evaluator to another folder.

    A config is plain values once it is read, so overriding its variable `data_root` alone would
    change nothing.

    Raises:
        InputError: the data sets have several folders, not all below the config's `data_root`.
    """
    data = {key: cfg[key] for key in cfg if key.endswith(("_dataloader", "_evaluator"))}
    texts = list(walk_strings(data))
    roots = sorted({text.rstrip("/") for _, key, text in texts if key == "data_root"})
    old = (cfg.get("data_root") or "").rstrip("/")
    if not old or not all(f"{each}/".startswith(f"{old}/") for each in roots):
        if len(roots) != 1:
            raise InputError(
                f"--cfg-options data_root={root}: the data sets have {len(roots)} folders "
                f"({', '.join(roots)}): set train_dataloader.dataset.data_root and so on"
            )
        old = roots[0]

    cfg.data_root = root.rstrip("/") + "/"
    for node, key, text in texts:
        if f"{text}/".startswith(f"{old}/"):
            node[key] = cfg.data_root + text[len(old) :].lstrip("/")


def walk_strings(node: dict | list) -> Iterator[tuple[dict | list, str | int, str]]:
    """Yield each string in a part of a config after the container and the key that it is under."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, str):
            yield node, key, value
        elif isinstance(value, dict | list):
            yield from walk_strings(value)


def unknown_key(cfg: Config, option: str) -> str | None:
    """Return a warning if an override names a key that the config lacks, with the nearest."""
    node = cfg.to_dict()
    keys, path = option.split("."), []
    for key in keys:
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list | tuple) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            break
        path.append(key)
    else:
        used = f"{keys[0]} is a variable, whose value is already filled in where the file uses it"
        return None if keys[0] in TOP_LEVEL else f"--cfg-options {option} has no effect: {used}"
    if not isinstance(node, Mapping) or key == "_delete_" or (not path and key in TOP_LEVEL):
        return None  # mmengine refuses it or reads it
    here, known = ".".join(path), [str(each) for each in node if each != "_scope_"]
    near = [".".join([*path, each]) for each in difflib.get_close_matches(key, known, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return f"--cfg-options {option} adds a new key, {here or 'the config'} has no {key!r}; {hint}"
