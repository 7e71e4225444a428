"""Reading configs: by path or `package::name`, with the overrides of --cfg-options."""

import ast
import inspect
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import Runner

from mrla_mm.compat.config_scope import find_config
from mrla_mm.errors import InputError, did_you_mean

# Top-level keys that are read once the overrides are applied: the runner's arguments, and others.
READ = """activation_checkpointing auto_scale_lr check_data find_unused_parameters model_wrapper_cfg
    runner_type strategy sync_bn tta_model tta_pipeline"""
TOP_LEVEL = {*inspect.signature(Runner).parameters, *READ.split()}


def read_config(name: str, options: Mapping[str, object]) -> Config:
    """Read the config of a path or `package::name` and apply overrides by dotted key.

    `data_root` moves every data set and evaluator. An override of a key that the config does not
    have is applied with a warning, since possibly nothing reads it; a variable of the file that
    nothing reads gets one too. Raises InputError if the config cannot be read, or `data_root` would
    not reach every data set.
    """
    path = find_config(name) if "::" in name else Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):  # YAML by tags such as !!python/object/apply
        raise InputError(f"config {name}: YAML, as JSON's bases may be, executes code: write .py")
    if not path.is_file():
        siblings = {each.name: each for each in path.parent.glob("*.py")}
        raise InputError(f"there is no config {name}{did_you_mean(path.name, siblings)}")
    try:
        cfg = Config.fromfile(path)
    except (InputError, ImportError):  # that of a module of the user's own has its traceback
        raise
    except Exception as error:  # whatever a config does
        raise InputError(f"config {name}: {type(error).__name__}: {error}") from error
    options = dict(options)
    if "data_root" in options:
        move_data_root(cfg, str(options.pop("data_root")))
    for option in options:
        if line := unknown_key(cfg, option):
            warnings.warn(line, stacklevel=2)
    for line in unread_variables(path, cfg):
        warnings.warn(f"config {name}: {line}", stacklevel=2)
    try:
        cfg.merge_from_dict(options)
    except (KeyError, TypeError) as error:  # a key of a list or below what is no dict
        raise InputError(f"--cfg-options: {error.args[0]}") from error
    for key, loader in cfg.items():
        if key.endswith("_dataloader") and loader and loader.get("num_workers") == 0:
            loader.persistent_workers = False  # else torch refuses the loader
    return cfg


def unread_variables(path: Path, cfg: Config) -> list[str]:
    """Return a line for each variable of a config with bases that nothing reads.

    What has used the variable of a base has used the base's value. Silent if both are the same.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:  # with {{$VARIABLE:default}}, which mmengine replaces
        return []
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    statements = [node for node in tree.body if isinstance(node, ast.Assign)]
    targets = [target for node in statements for target in node.targets]
    assigned = [target.id for target in targets if isinstance(target, ast.Name)]
    values = cfg.to_dict()
    lines = []
    if "_base_" not in assigned and "read_base" not in loaded:  # such as one that a run has written
        return lines
    for name in assigned:
        if name in TOP_LEVEL | loaded | {"custom_imports"} or name not in values:
            continue
        others = {key: value for key, value in values.items() if key != name}
        if not appears(values[name], others):
            told = f"nothing reads {name}, what uses it in the bases has their value"
            lines.append(told + did_you_mean(name, TOP_LEVEL, least=0.9))
    return lines


def appears(wanted: object, node: object) -> bool:
    """Whether a value is somewhere in a tree of dicts and lists."""
    if node == wanted:
        return True
    if isinstance(node, dict):
        node = list(node.values())
    return isinstance(node, list | tuple) and any(appears(wanted, value) for value in node)


def move_data_root(cfg: Config, root: str) -> None:
    """Point every data set and evaluator, which have `data_root` filled in, to another folder.

    Raises InputError if they have several folders, not all below `data_root`.
    """
    data = {key: cfg[key] for key in cfg if key.endswith(("_dataloader", "_evaluator"))}
    texts = list(walk_strings(data))
    roots = sorted({text.rstrip("/") for _, key, text in texts if key == "data_root"})
    old = (cfg.get("data_root") or "").rstrip("/")
    if not old or not all(f"{each}/".startswith(f"{old}/") for each in roots):
        old = roots[0] if len(roots) == 1 else None
    if not root:
        raise InputError("--cfg-options data_root= is empty: name a folder, or . for this one")
    if old is None:
        folders = f"the data sets have {len(roots)} folders ({', '.join(roots)})"
        remedy = "set train_dataloader.dataset.data_root and so on"
        raise InputError(f"--cfg-options data_root={root}: {folders}: {remedy}")
    cfg.data_root = root.rstrip("/") + "/"
    for node, key, text in texts:
        if key == "data_root" or (old and f"{text}/".startswith(f"{old}/")):
            node[key] = cfg.data_root + text[len(old) :].lstrip("/")


def walk_strings(node: dict | list) -> Iterator[tuple[dict | list, str | int, str]]:
    """Yield container, key and text of what may be a path: not of `metainfo`, not in a tuple."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, str) and not isinstance(node, tuple):
            yield node, key, value
        elif isinstance(value, dict | list | tuple) and key != "metainfo":
            yield from walk_strings(value)


def unknown_key(cfg: Config, option: str) -> str | None:
    """Return a warning if nothing may read an override, with the nearest key that is read."""
    top = option.partition(".")[0]
    if top in cfg and top not in TOP_LEVEL:
        used = f"{top}, a variable or an import, is used while the file is read"
        return f"--cfg-options {option} has no effect: {used}"
    if top in TOP_LEVEL and top not in cfg:
        return None
    node = cfg.to_dict()
    path = ""
    for key in option.split("."):
        if isinstance(node, list | tuple):
            node = {str(index): item for index, item in enumerate(node)}
        if not isinstance(node, dict) or key == "_delete_":
            return None  # mmengine refuses it or reads it
        if key not in node:
            known = [str(each) for each in node if each != "_scope_"]
            hint = did_you_mean(key, known, prefix=path) or f"; there are {', '.join(known)}"
            return f"--cfg-options {option} adds the new key {path}{key}{hint}"
        node = node[key]
        path += f"{key}."
    return None
