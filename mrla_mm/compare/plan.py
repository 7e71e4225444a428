"""What a comparison runs: configs, each written as it runs to `<out>/<config>/<config>.py`."""

import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config

from mrla_mm.atomic import write_atomically
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model

# Parts of a config that decide how a model is trained and tested, by what is said if they differ.
TRAINING = ("train_cfg", "train_dataloader", "optim_wrapper", "param_scheduler")
TRAINING += ("auto_scale_lr", "custom_hooks", "load_from")
SETTINGS = {
    "trains by another schedule": TRAINING,
    "is tested otherwise": ("test_dataloader", "test_evaluator"),
}
RESULT = "result.json"  # in the folder of a run that is finished


class Plan(NamedTuple):
    """Configs to run by name, of which the first is the baseline, seeds, remarks for the table."""

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
    for given in names:
        cfg = read_and_build(given, options)
        name = Path(cfg.filename).stem
        if name in configs:
            raise InputError(f"there are two configs {name}, and one folder {out / name}")
        configs[name] = cfg
    remarks = find_remarks(configs)
    files = {name: out / name / f"{name}.py" for name in configs}
    first = next(iter(configs))
    digest = hashlib.sha256(repr(configs[first].model).encode()).hexdigest()
    for name, cfg in configs.items():
        overrides = {"randomness.seed": 0}  # each run sets its own
        # Their random state would go on from epoch to epoch, but not into a resumed run.
        overrides["train_dataloader.persistent_workers"] = False
        overrides["default_hooks.checkpoint.type"] = "AtomicCheckpointHook"
        overrides["default_hooks.checkpoint.max_keep_ckpts"] = 1
        overrides["default_hooks.checkpoint.out_dir"] = None  # all configs would share it
        if share_weights:
            overrides["compare.weights_shared_with"] = first
            # Not read: a config is another one for `check_unchanged` if the first one's model is.
            overrides["compare.first_model_sha256"] = None if name == first else digest
        cfg.merge_from_dict(overrides)
        check_unchanged(files[name], cfg)
    for name, cfg in configs.items():
        write_atomically(files[name], cfg.pretty_text.encode())
    return Plan(out, files, seeds, remarks)


def read_and_build(name: str, options: Mapping[str, object]) -> Config:
    """Read a config, and see whether its model can be built."""
    try:
        cfg = read_config(name, options)
        build_model(cfg)
        return cfg
    except InputError:
        raise
    except Exception as error:  # whatever a config does
        raise InputError(f"config {name}: {type(error).__name__}: {error}") from error


def find_remarks(configs: Mapping[str, Config]) -> list[str]:
    """Say which configs train by another schedule than the first, or are tested otherwise."""
    remarks = []
    first, *others = configs
    for name in others:
        own, base = configs[name], configs[first]
        for what, keys in SETTINGS.items():
            changed = [key for key in keys if own.get(key) != base.get(key)]
            if changed:
                remarks.append(f"{name} {what} than {first}: {', '.join(changed)} differ.")
    return remarks


def check_unchanged(file: Path, cfg: Config) -> None:
    """Raise InputError if there are runs of another config beside a config's file."""
    runs = file.parent
    begun = any(runs.glob("seed_*/last_checkpoint")) or any(runs.glob(f"seed_*/{RESULT}"))
    if not begun or not file.is_file() or file.read_text() == cfg.pretty_text:
        return
    old = Config.fromfile(file).to_dict()
    new = Config.fromstring(cfg.pretty_text, ".py").to_dict()
    what = "of another config"
    if old | {"compare": None} == new | {"compare": None}:
        what = "that shared their initial weights with another first config, or with none"
    raise InputError(f"{file.parent} has runs {what}: delete it, or give another --out")
