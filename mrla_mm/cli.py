"""What the command line tools share: arguments, the config and runner, and how errors end a run."""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mrla_mm.config import add_option_argument, read_config
from mrla_mm.datasets.checks import check_data
from mrla_mm.errors import InputError
from mrla_mm.version import __version__


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every tool that runs a config takes: work directory, overrides and launcher."""
    folder = "folder for logs and checkpoints (default: work_dirs/<config name>)"
    parser.add_argument("--work-dir", help=folder)
    add_option_argument(parser)
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    rank = "set by torch.distributed.launch"
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=rank)


def load_config(args: argparse.Namespace) -> Config:
    """Read the config of the parsed arguments and apply their overrides."""
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    default = f"work_dirs/{Path(cfg.filename).stem}"
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or default
    return cfg


def build_runner(cfg: Config, *phases: str) -> Runner:
    """Build the config's runner, on CPUs with gloo, and check data before mmdet reads them."""
    cfg.mrla_mm_version = __version__
    if cfg.launcher == "pytorch" and not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo")
        wrapper = dict(type="MMDistributedDataParallel", broadcast_buffers=False)
        wrapper.update(find_unused_parameters=cfg.get("find_unused_parameters", False))
        wrapper.update(cfg.get("model_wrapper_cfg") or {}, device_ids=None)
        cfg.model_wrapper_cfg = wrapper
    runner = RUNNERS.build(cfg)
    check_data(runner, *phases)
    return runner


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Run a tool and return its exit code: 0, or 2 for an InputError and 130 for Ctrl-C.

    These two end it with one line on stderr; anything else keeps its traceback.
    """
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")  # in mmengine
    code = 0
    try:
        main(argv)
    except InputError as error:  # a data loading worker wraps the message into its traceback
        code = 2
        message = f"error: {str(error).rpartition('InputError: ')[2].strip()}"
    except KeyboardInterrupt as stop:
        code = 130
        message = f"interrupted: {stop}".removesuffix(": ")
    if code:
        print(message, file=sys.stderr, flush=True)  # noqa: T201
    elif torch.distributed.is_initialized():
        gc.collect()  # the wrapped model holds the group, whose threads may abort the process
        torch.distributed.destroy_process_group()
    return code
