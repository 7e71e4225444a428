"""What a comparison runs: configs, each written as it runs to `<out>/<config>/<config>.py`."""

import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config, ConfigDict
from torch import nn

from mrla_mm.atomic import write_atomically
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

# Parts of a config that decide how a model is trained.
SCHEDULE = ("train_cfg", "train_dataloader", "optim_wrapper", "param_scheduler")
SCHEDULE += ("custom_hooks", "load_from")
SETTING = bool | int | float | str | tuple | list | ConfigDict | None
RESULT = "result.json"  # in the folder of a run that is finished


class Plan(NamedTuple):
    """Files of the configs by name, the first of which is the base, and what to know of them."""

    out: Path
    files: dict[str, Path]
    seeds: range
    remarks: list[str]

    def run_folders(self) -> list[Path]:
        """Return the folders of all runs, seed by seed."""
        files = self.files.values()
        return [file.with_name(f"seed_{seed}") for seed in self.seeds for file in files]

    def missing(self) -> list[Path]:
        """Return the folders of the runs that are not finished."""
        return [folder for folder in self.run_folders() if not (folder / RESULT).is_file()]


@contextmanager
def reserve(out: Path) -> Iterator[None]:
    """Keep other comparisons out of a folder; raises InputError if one is running in it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            remedy = "wait for its end, or give another folder"
            raise InputError(f"--out {out} is in use by {file.read()}: {remedy}") from None
        except OSError as error:
            raise InputError(f"--out {out}: no locks on its disk ({error}): name another") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def make_plan(
    names: Sequence[str], out: Path, seeds: range, options: Mapping, *, share_weights: bool = True
) -> Plan:
    """Read the configs and write them as they run.

    Raises InputError if one cannot be read or its model not be built, two have one name, or a
    folder has runs of another config.
    """
    configs = {}
    models = {}
    for given in names:
        cfg, model = read_and_build(given, options)
        name = Path(cfg.filename).stem
        if name in configs:
            raise InputError(f"there are two configs {name}, and one folder {out / name}")
        configs[name] = cfg
        models[name] = settings_of(model)
    remarks = find_remarks(configs, models)
    files = {name: out / name / f"{name}.py" for name in configs}
    first = next(iter(configs))  # `check_unchanged` notices another one by its digest
    digest = hashlib.sha256(repr(configs[first].model).encode()).hexdigest()
    for name, cfg in configs.items():
        overrides = {"randomness.seed": 0}  # each run sets its own
        # Their random state would go on from epoch to epoch, but not into a resumed run.
        overrides["train_dataloader.persistent_workers"] = False
        overrides["default_hooks.checkpoint.type"] = "AtomicCheckpointHook"
        overrides["default_hooks.checkpoint.max_keep_ckpts"] = 1
        if share_weights:
            overrides["compare.weights_shared_with"] = str(files[first])
            overrides["compare.its_model"] = None if name == first else digest
        cfg.merge_from_dict(overrides)
        check_unchanged(files[name], cfg)
    for name, cfg in configs.items():
        write_atomically(files[name], cfg.pretty_text.encode())
    return Plan(out, files, seeds, remarks)


def read_and_build(name: str, options: Mapping[str, object]) -> tuple[Config, nn.Module]:
    """Read a config and build its model."""
    try:
        cfg = read_config(name, options)
        return cfg, build_model(cfg)
    except InputError:
        raise
    except Exception as error:  # whatever a config does
        raise InputError(f"config {name}: {type(error).__name__}: {error}") from error


def settings_of(model: nn.Module) -> list[tuple[str, str, str]]:
    """Return name, class, settings and shapes of every module; equal for the same model."""
    found = []
    for name, module in model.named_modules():
        pairs = vars(module).items()
        settings = {key: value for key, value in pairs if isinstance(value, SETTING)}
        settings["shapes"] = [tuple(each.shape) for each in module.parameters(recurse=False)]
        found.append((name, str(type(module)), repr(settings)))
    return found


def find_remarks(configs: Mapping[str, Config], models: Mapping[str, Sequence]) -> list[str]:
    """Say which configs build the same model, and which train by another schedule."""
    remarks = []
    for earlier, name in combinations(configs, 2):
        if models[earlier] == models[name]:
            remarks.append(f"{name} builds the same model as {earlier}.")
    first, *others = configs
    for name in others:
        own, base = configs[name], configs[first]
        changed = [key for key in SCHEDULE if own.get(key) != base.get(key)]
        if changed:
            keys = ", ".join(changed)
            remarks.append(f"{name} trains by another schedule than {first}: {keys} differ.")
    return remarks


def check_unchanged(file: Path, cfg: Config) -> None:
    """Raise InputError if there are runs of another config beside a config's file."""
    begun = any(file.parent.glob("seed_*/last_checkpoint"))
    if not begun or not file.is_file() or file.read_text() == cfg.pretty_text:
        return
    old = Config.fromfile(file).to_dict()
    new = Config.fromstring(cfg.pretty_text, ".py").to_dict()
    what = "of another config"
    if old | {"compare": None} == new | {"compare": None}:
        what = "that shared their initial weights with another first config, or with none"
    raise InputError(f"{file.parent} has runs {what}: delete it, or give another --out")
