"""What the command line tools share: their common arguments, the config they end up with, and how errors end a run."""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mrla_mm.arguments import type_name
from mrla_mm.config import check_channels, check_keys, check_parts, locate_config, read_file
from mrla_mm.datasets import check_datasets
from mrla_mm.errors import InputError
from mrla_mm.notices import collected, log_quietly
from mrla_mm.overrides import check_option_keys, check_top_level, move_data_root
from mrla_mm.version import __version__, commit

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")


class OptionsAction(DictAction):
    """mmengine's KEY=VALUE parsing, with a usage message instead of a traceback for what does not parse."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Merge the pairs of one --cfg-options into the namespace."""
        for pair in values:
            if "=" not in pair:
                parser.error(f"{option_string}: {pair!r} is not of the form key=value")
        try:
            super().__call__(parser, namespace, values, option_string)
        except (AssertionError, ValueError) as error:
            parser.error(f"{option_string}: {error}")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every tool that runs a config takes: work directory, overrides and launcher."""
    parser.add_argument("--work-dir", help="folder for logs and checkpoints (default: work_dirs/<config name>)")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=OptionsAction,
        default={},
        metavar="KEY=VALUE",
        help="override config values, e.g. model.backbone.init_cfg=None train_dataloader.batch_size=4; "
        'lists as key="[a,b]" or key=a,b, without spaces',
    )
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none", help="job launcher")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help="set by torch.distributed.launch")


def find_images(source: str | Path) -> list[Path]:
    """Return the image file that the user names, or those of the folder, in order of their names.

    Raises:
        InputError: there is no such file or folder, or the folder holds no image.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"input {source} does not exist: give an image file or a folder of images")
    images = sorted(path for path in source.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not images:
        raise InputError(f"folder {source} holds no image: {', '.join(IMAGE_SUFFIXES)} files are looked for")
    return images


def load_config(args: argparse.Namespace) -> Config:
    """Read the config of the parsed arguments and apply their overrides, launcher and work directory.

    Raises:
        InputError: a config file is missing or broken, or an override names a key that nothing reads.
    """
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(Path("work_dirs") / Path(cfg.filename).stem)
    if Path(cfg.work_dir).is_file():
        raise InputError(f"--work-dir {cfg.work_dir} is a file; name a folder")
    return cfg


def read_config(name: str, options: Mapping[str, object]) -> Config:
    """Read the config that `locate_config` finds and apply overrides.

    Raises:
        InputError: a config file is missing or broken, or an override names a key that nothing reads.
    """
    cfg = read_file(locate_config(name))
    options = dict(options)
    if "data_root" in options:
        move_data_root(cfg, options.pop("data_root"))
    check_option_keys(cfg, options)
    try:
        cfg.merge_from_dict(options)
    except (TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"--cfg-options {' '.join(options)} do not fit the config ({error}): below a value that is None or no "
            "dictionary, override the whole of it"
        ) from error
    return cfg


def check_amp_device(cfg: Config) -> None:
    """Refuse a training in mixed precision without an accelerator before anything is built.

    Raises:
        InputError: the optimizer wrapper is AmpOptimWrapper and only a CPU is available.
    """
    wrapper = cfg.get("optim_wrapper")
    kind = wrapper.get("type") if isinstance(wrapper, Mapping) else None
    if type_name(kind) == "AmpOptimWrapper" and get_device() == "cpu":
        raise InputError(
            "mixed precision (--amp, or optim_wrapper.type=AmpOptimWrapper) needs a GPU and this machine shows none: "
            "drop --amp, or check the driver and CUDA_VISIBLE_DEVICES. A CPU computes in bfloat16 without --amp, by "
            "--cfg-options optim_wrapper.type=BFloat16OptimWrapper"
        )


def check_processes(cfg: Config) -> None:
    """Refuse more processes of torchrun on this machine than it has GPUs, unless they are to run on the CPU.

    Raises:
        InputError: names the number of processes, that of GPUs, and the option for CPU processes.
    """
    if cfg.launcher != "pytorch" or runs_on_cpu(cfg):
        return
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > gpus:
        raise InputError(
            f"{processes} processes were started on a machine with {gpus} GPUs (CUDA_VISIBLE_DEVICES counts): start as "
            "many as there are GPUs, or without any, train on the CPU with --cfg-options env_cfg.dist_cfg.backend=gloo"
        )


def runs_on_cpu(cfg: Config) -> bool:
    """Whether distributed processes are meant for the CPU: gloo between them, and no GPU to use."""
    backend = cfg.get("env_cfg", {}).get("dist_cfg", {}).get("backend")
    return backend == "gloo" and not torch.cuda.is_available()


def preflight(cfg: Config, phases: Collection[str]) -> list[str]:
    """Check what can be known before anything is built; once per machine, by its first process.

    Only what the phases read is judged: "train", "val", "test", and "tta" for test-time augmentation. Returns the
    warnings given, for `build_runner` to write into the log.

    Raises:
        InputError: the first thing found that would stop or spoil the run.
    """
    if "train" in phases:
        check_amp_device(cfg)
    local_rank = os.environ.get("SLURM_LOCALID") if cfg.launcher == "slurm" else os.environ.get("LOCAL_RANK")
    with collected() as warned:
        if int(local_rank or 0) == 0:
            check_top_level(cfg, phases)
            check_keys(cfg, phases)
            check_parts(cfg, phases)
            check_processes(cfg)
            check_datasets(cfg, phases)
            check_channels(cfg.get("model") or {}, scope=cfg.get("default_scope"))
    return warned


def build_runner(cfg: Config, warned: Sequence[str] = ()) -> Runner:
    """Build the Runner, or the class the config's `runner_type` names, and note in the config which code runs.

    What the checks before `warned` of is written to its log. mmengine gives each of torchrun's processes a GPU;
    processes on the CPU are set up here.
    """
    cfg.provenance = dict(version=__version__, commit=commit())
    if cfg.launcher == "pytorch" and runs_on_cpu(cfg):
        torch.distributed.init_process_group("gloo")
        unused = cfg.get("find_unused_parameters", False)
        wrapper = dict(type="MMDistributedDataParallel", broadcast_buffers=False, find_unused_parameters=unused)
        cfg.model_wrapper_cfg = {**wrapper, **(cfg.get("model_wrapper_cfg") or {}), "device_ids": None}
    runner = RUNNERS.build(cfg)
    log_quietly(runner, warned)
    return runner


def message_of(error: InputError) -> str:
    """Return the message alone; torch wraps one raised in a data loading worker into the worker's traceback."""
    return str(error).rpartition("InputError: ")[2].strip()


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Run a tool; an InputError or Ctrl-C ends it with one line on stderr, anything else keeps its traceback.

    Returns:
        The exit code: 0, 2 for an InputError, 130 for Ctrl-C.
    """
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")  # mmengine's concern, not the user's
    try:
        main(argv)
    except InputError as error:
        print(f"error: {message_of(error)}", file=sys.stderr, flush=True)  # noqa: T201
        return 2
    except KeyboardInterrupt as stop:
        print(": ".join(filter(None, ("interrupted", str(stop)))), file=sys.stderr, flush=True)  # noqa: T201
        return 130
    if torch.distributed.is_initialized():
        gc.collect()  # the wrapped model holds the process group; its threads may abort a process that ends under them
        torch.distributed.destroy_process_group()
    return 0
