"""What a finished run measured: its work directory read, matched with a row of the paper's tables, and checked.

A run counts as a measurement of a row only if its config is the row's in all that decides the result, it reached the
last epoch, and it saw as many images an epoch as the row's data set has.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config

from mrla_mm.analysis.logs import read_log
from mrla_mm.analysis.paper_rows import PaperRow
from mrla_mm.arguments import type_name
from mrla_mm.config import read_file
from mrla_mm.errors import InputError

# What training sees an epoch: COCO train2017 without images that have no object, and ImageNet-1K.
COCO_IMAGES, IMAGENET_IMAGES = 117_266, 1_281_167
# Free to differ from the config of a row: where data and start weights lie, machine, precision, cost.
FREE = re.compile(
    r"model\.backbone\.(init_cfg|with_cp)|optim_wrapper\.(type|loss_scale|dtype)$|"
    r"\w+_dataloader\.(batch_size|num_workers|persistent_workers|pin_memory|prefetch_factor)|"
    r"\w+_dataloader\.dataset\.(data_root|ann_file|data_prefix|backend_args)|"
    r"\w+_dataloader\.dataset\.pipeline\.\d+\.backend_args|\w+_evaluator\.(ann_file|backend_args)"
)
DECISIVE = (
    "model",
    "train_cfg",
    "param_scheduler",
    "optim_wrapper",
    "train_dataloader",
    "val_dataloader",
    "custom_hooks",
)
MIXED = ("AmpOptimWrapper", "ApexOptimWrapper", "BFloat16OptimWrapper")
STAMP = re.compile(r"\d{8}_\d{6}")


class Session(NamedTuple):
    """One start of a tool: a folder named by the second it began in."""

    folder: Path
    cfg: Config
    lines: Sequence[Mapping]  # logged figures, in order
    tested: Mapping  # figures of tools/test.py, empty for a training
    log: str

    @property
    def trains(self) -> bool:
        """Whether the session logged a training step."""
        return any("loss" in line for line in self.lines)


def percent(figures: Mapping[str, float]) -> dict[str, float]:
    """Accuracies and APs in percent; mmdet logs AP as a fraction."""
    kept = {key: value for key, value in figures.items() if re.match(r"coco/\w+_mAP|accuracy/top", key)}
    return {key: round(value * (100 if key.startswith("coco/") else 1), 2) for key, value in kept.items()}


def read_sessions(work_dir: Path) -> list[Session]:
    """Read every start of a tool in a work directory, or the one whose folder is given.

    Raises:
        InputError: there is none, or a file of one is damaged.
    """
    if STAMP.fullmatch(work_dir.name):
        folders = [work_dir]
    else:
        folders = sorted(path for path in work_dir.glob("*") if STAMP.fullmatch(path.name))
    sessions = []
    for folder in folders:
        config = folder / "vis_data/config.py"
        if not config.is_file():
            continue
        scalars, tested = folder / "vis_data/scalars.json", folder / f"{folder.name}.json"
        lines = read_log(scalars) if scalars.is_file() else []
        log = "".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.log"))
        results = read_json(tested) if tested.is_file() else {}
        sessions.append(Session(folder, read_file(config), lines, results, log))
    if not sessions:
        what = "holds no run" if work_dir.is_dir() else "does not exist"
        raise InputError(f"{work_dir} {what}: give the --work-dir of a training (it has folders named by time)")
    return sessions


def read_json(path: Path) -> dict:
    """Parse a JSON file of figures; raise InputError naming it if it is cut off, damaged or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is cut off or damaged: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a {type(found).__name__}, not figures by name")
    return found


def flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Leaves of nested dictionaries and sequences by their dotted paths."""
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if key != "_scope_"]
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    leaves = {}
    for key, item in items:
        leaves |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def decisive(cfg: Mapping) -> dict[str, object]:
    """Leaves of a config that decide what a run measures."""
    leaves = flatten({key: cfg[key] for key in DECISIVE if key in cfg})
    return {key: value for key, value in leaves.items() if not FREE.match(key)}


def row_config(row: PaperRow, configs: Path) -> Config:
    """Return the config of a row, its options applied."""
    cfg = copy.deepcopy(read_config(configs / f"{row.config}.py"))
    cfg.merge_from_dict(dict(row.options))
    return cfg


@cache
def read_config(path: Path) -> Config:
    """Read a config file once: many rows share one, and reading costs a good part of a second."""
    return Config.fromfile(path)


def match_row(cfg: Config, rows: Iterable[PaperRow], load: Callable[[PaperRow], Config], name: str) -> PaperRow:
    """Return the row whose config decides the same as that of a run.

    Args:
        cfg: the run's.
        rows: the paper's.
        load: gives the config of a row.
        name: the run's config file without its suffix; rows of this config are compared first.

    Raises:
        InputError: there is none, or several; names what differs from the nearest.
    """
    own, nearest = decisive(cfg), None
    ordered = sorted(rows, key=lambda row: Path(row.config).name != name)
    same_name = [row for row in ordered if Path(row.config).name == name]
    found = []
    for row in same_name or ordered:
        theirs = decisive(load(row))
        keys = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
        if not keys:
            found.append(row)
        elif nearest is None or len(keys) < len(nearest[1]):
            nearest = row, keys, theirs
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"the run fits several rows: {', '.join(row.model for row in found)}")
    if nearest is None:
        raise InputError("there are no rows to compare the run with")
    row, keys, theirs = nearest
    shown = "; ".join(f"{key} is {own.get(key)!r}, not {theirs.get(key)!r}" for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    raise InputError(f"the run is none of the paper's rows; nearest is {row.model!r}, but {shown}{more}")


def final_figures(sessions: Sequence[Session], epochs: int) -> dict[str, float]:
    """Return the figures of the last epoch: of its validation, or of a test of its checkpoint, in percent.

    Raises:
        InputError: the last epoch was not reached or not evaluated, or figures of it disagree.
    """
    found = []
    for session in sessions:
        found += [percent(line) for line in session.lines if line.get("step") == epochs and "loss" not in line]
        if session.tested and Path(session.cfg.get("load_from") or "").name == f"epoch_{epochs}.pth":
            found.append(percent(session.tested))
    found = [figures for figures in found if figures]
    if not found:
        reached = max((line["epoch"] for session in sessions for line in session.lines if "epoch" in line), default=0)
        raise InputError(
            f"incomplete: the run logged training up to epoch {reached} of {epochs} and no figures of its end; "
            f"continue it with --resume, or evaluate epoch_{epochs}.pth with tools/test.py"
        )
    if any(figures != found[0] for figures in found):
        raise InputError(
            f"ambiguous: the folder holds different figures of epoch {epochs} (of several runs, or tests with other "
            "settings); give the folder of one run, named by its time"
        )
    if any(value < 0 for key, value in found[0].items() if key.endswith("_mAP")):
        raise InputError("an AP of -1 says that the evaluated set has no objects; evaluate on val2017")
    return found[0]


def settings(session: Session) -> dict[str, object]:
    """Return GPUs, images a step and an epoch, and precision of a training session.

    Raises:
        InputError: its log is missing or cut.
    """
    gpus = re.search(r"GPU number: (\d+)", session.log)
    steps = re.findall(r"Epoch\(train\)\s+\[\d+\]\[\s*\d+/(\d+)\]", session.log)
    if not gpus or not steps:
        raise InputError(f"{session.folder} has no complete .log file, which tells GPUs and iterations of an epoch")
    wrapper = session.cfg.optim_wrapper
    batch = int(gpus[1]) * session.cfg.train_dataloader.batch_size * wrapper.get("accumulative_counts", 1)
    images = int(steps[-1]) * int(gpus[1]) * session.cfg.train_dataloader.batch_size
    return dict(gpus=int(gpus[1]), batch=batch, amp=type_name(wrapper.get("type")) in MIXED, images=images)


def check_size(images: int, expected: int) -> None:
    """Raise InputError unless the images of an epoch are those of the data set, to 2 %."""
    if abs(images - expected) > 0.02 * expected:
        raise InputError(
            f"an epoch of the run had {images:,} images and that of the paper's has {expected:,}: it measures "
            "something else, and its figures do not belong beside the paper's"
        )


def read_run(
    work_dir: Path,
    rows: Sequence[PaperRow],
    load: Callable[[PaperRow], Config],
    *,
    images: int | None = None,
    memory_only: bool = False,
) -> dict[str, object]:
    """Return what a work directory measured, as `docs/measured.json` keeps it.

    Args:
        work_dir: of a training, or the folder of one of its starts.
        rows: the paper's.
        load: gives the config of a row.
        images: of an epoch; COCO's or ImageNet's by default.
        memory_only: take the memory for each GPU of a run that need not have ended.

    Raises:
        InputError: it is no measurement of one row; says why.
    """
    sessions = read_sessions(work_dir)
    training = [session for session in sessions if session.trains]
    if not training:
        raise InputError(f"{work_dir} holds no training, only tests; give the --work-dir of the training, too")
    last = training[-1]
    base = last.folder.parent
    name = next((path.stem for path in sorted(base.glob("*.py"))), "")  # the config file, as mmengine copies it
    models = [match_row(session.cfg, rows, load, name) for session in training]
    if any(row.model != models[0].model for row in models):
        raise InputError(f"ambiguous: {work_dir} holds runs of {' and '.join(sorted({row.model for row in models}))}")
    setting = settings(last)
    scaling = last.cfg.get("auto_scale_lr", {})
    if not scaling.get("enable") and setting["batch"] != scaling.get("base_batch_size", setting["batch"]):
        raise InputError(
            f"steps of {setting['batch']} images with a learning rate for {scaling['base_batch_size']}, which "
            "auto_scale_lr.enable=True would have scaled"
        )
    check_size(setting.pop("images"), images or (COCO_IMAGES if models[0].is_detector else IMAGENET_IMAGES))
    memory = max((line["memory"] for session in training for line in session.lines if "memory" in line), default=None)
    if memory_only and memory is None:
        raise InputError("the run logged no GPU memory")
    source = last.cfg.get("provenance", {})
    return dict(
        model=models[0].model,
        run=f"{base.name}/{last.folder.name}",
        date=str(datetime.strptime(last.folder.name, "%Y%m%d_%H%M%S").date()),
        version=source.get("version"),
        commit=source.get("commit"),
        start=(training[0].cfg.model.backbone.get("init_cfg") or {}).get("checkpoint"),
        **setting,
        memory=memory,
        figures={} if memory_only else final_figures(sessions, last.cfg.train_cfg.max_epochs),
    )
