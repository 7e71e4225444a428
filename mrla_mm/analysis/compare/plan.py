"""What a comparison runs: configs, each written as it runs to `<out>/<config>/<config>.py`."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config

from mrla_mm.atomic import write_atomically
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

# Keys of a config that decide how a model is trained and tested.
RECIPE_KEYS = ("train_cfg", "train_dataloader", "optim_wrapper", "param_scheduler", "auto_scale_lr")
RECIPE_KEYS += ("custom_hooks", "load_from", "test_dataloader", "test_evaluator")
MODEL_KEYS = ("model", "data_preprocessor", "default_scope")  # that `build_model` reads
OVERRIDES = {
    "randomness.seed": 0,  # each run sets its own
    "train_dataloader.persistent_workers": False,  # a resumed run would not have their random state
    "default_hooks.checkpoint.type": "AtomicCheckpointHook",
    "default_hooks.checkpoint.max_keep_ckpts": 1,
    "default_hooks.checkpoint.out_dir": None,  # all configs would share it
}
# Files of a run that say how far it is; see the package.
BEGUN = "last_checkpoint"
TRAINED = "trained.json"
RESULT = "result.json"


class Run(NamedTuple):
    """A config trained and tested from a seed."""

    config: str
    seed: int
    folder: Path  # of its files

    def is_finished(self) -> bool:
        """Whether it is trained and tested."""
        return (self.folder / RESULT).is_file()


class Plan(NamedTuple):
    """Names of configs, of which the first is the baseline, seeds, and remarks for the table."""

    out: Path
    names: list[str]
    seeds: range
    remarks: list[str]

    def runs(self) -> list[Run]:
        """Return all runs, seed by seed."""
        pairs = itertools.product(self.seeds, self.names)
        return [Run(name, seed, self.out / name / f"seed_{seed}") for seed, name in pairs]


def config_file(folder: Path) -> Path:
    """Return the file of a config as it runs, in the folder of its name."""
    return folder / f"{folder.name}.py"


def make_plan(names: Sequence[str], out: Path, seeds: range, options: Mapping) -> Plan:
    """Read the configs and write them as they run.

    Raises InputError if one cannot be read or its model not be built, two have one name, or a
    folder has runs of another config.
    """
    configs = read_configs(names, options)
    remarks = find_remarks({name: cfg.to_dict() for name, cfg in configs.items()})
    first, *_ = configs.values()
    share_weights_with = {key: first.get(key) for key in MODEL_KEYS}
    for name, cfg in configs.items():
        cfg.merge_from_dict(OVERRIDES)
        cfg.share_weights_with = share_weights_with
        check_unchanged(out / name, cfg)
    for name, cfg in configs.items():
        write_atomically(config_file(out / name), cfg.pretty_text.encode())
    return Plan(out, list(configs), seeds, remarks)


def read_configs(names: Sequence[str], options: Mapping[str, object]) -> dict[str, Config]:
    """Read configs, by the names of their files, and try to build their models."""
    configs = {}
    for given in names:
        try:
            cfg = read_config(given, options)
            build_model(cfg)
        except Exception as error:  # whatever a config does
            raise InputError(f"config {given}: {type(error).__name__}: {error}") from error
        name = Path(cfg.filename).stem
        if name in configs:
            raise InputError(f"there are two configs {name}, which would share a folder")
        configs[name] = cfg
    return configs


def find_remarks(configs: Mapping[str, dict]) -> list[str]:
    """Say which configs, as plain values, are not trained and tested as the first is."""
    remarks = []
    first = next(iter(configs))
    for name, cfg in configs.items():
        changed = [key for key in RECIPE_KEYS if cfg.get(key) != configs[first].get(key)]
        if changed:
            keys = ", ".join(changed)
            remarks.append(f"{name} is not trained or tested as {first} is: {keys} differ.")
    return remarks


def check_unchanged(folder: Path, cfg: Config) -> None:
    """Raise InputError if a config's folder has runs of another config."""
    file = config_file(folder)
    is_changed = file.is_file() and file.read_text() != cfg.pretty_text
    if is_changed and any(path.name in (BEGUN, RESULT) for path in folder.glob("seed_*/*")):
        told = "has runs of another config, or from the weights of another first config"
        raise InputError(f"{folder} {told}: delete it, or give another --out")
