"""Reading configs: by path or `package::name`, with the overrides of --cfg-options."""

import argparse
import difflib
import inspect
import warnings
from collections.abc import Mapping

from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from mrla_mm.compat.config_scope import find_config

# Top-level keys that a config may gain: the Runner's own arguments and what mmengine and the tools
# read beside them.
TOP_LEVEL = {
    *inspect.signature(Runner).parameters,
    "activation_checkpointing",
    "auto_scale_lr",
    "compile",
} | {
    *(
        "custom_imports",
        "find_unused_parameters",
        "model_wrapper_cfg",
        "runner_type",
        "strategy",
        "sync_bn",
    ),
    *("tta_model", "tta_pipeline"),
}


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cfg-options."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        default={},
        metavar="KEY=VALUE",
        help="override config values, e.g. train_dataloader.batch_size=4; lists as key=[a,b], without spaces",
    )


def read_config(name: str, options: Mapping[str, object]) -> Config:
    """Read the config of a path or `package::name` and apply overrides by dotted key.

    `data_root` moves every data set and evaluator below the config's `data_root`. An override of a
    key that the config does not have is applied with a warning: mmengine accepts any, and possibly
    nothing reads it. The warnings are kept in `cfg.option_warnings` too, for the log of the run.

    Raises:
        InputError: there is no such config; names the nearest.
    """
    cfg = Config.fromfile(find_config(name))
    options = dict(options)
    if "data_root" in options and isinstance(cfg.get("data_root"), str) and cfg.data_root:
        move_data_root(cfg, str(options.pop("data_root")))
    unknown = [line for option in options if (line := unknown_key(cfg, option))]
    cfg.merge_from_dict(options)
    for line in unknown:
        warnings.warn(line, stacklevel=2)
    if unknown:
        cfg.option_warnings = unknown
    return cfg


def move_data_root(cfg: Config, root: str) -> None:
    """Point every data set and evaluator below the config's `data_root` to another folder.

    A config is plain values once it is read, so overriding its variable `data_root` alone would
    change nothing.
    """
    old, new = cfg.data_root.rstrip("/"), root.rstrip("/") + "/"

    def moved(value):
        if isinstance(value, dict):
            return type(value)({key: moved(item) for key, item in value.items()})
        if isinstance(value, list | tuple):
            return type(value)(moved(item) for item in value)
        below = isinstance(value, str) and f"{value}/".startswith(f"{old}/")
        return new + value[len(old) :].lstrip("/") if below else value

    cfg.data_root = new
    for key in list(cfg):
        if key.endswith(("_dataloader", "_evaluator")):
            cfg[key] = moved(cfg[key])


def unknown_key(cfg: Config, option: str) -> str | None:
    """Return a warning if an override names a key that the config does not have, with the nearest that it has."""
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
