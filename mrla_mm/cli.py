"""What the command line tools share: their arguments, the config and runner these lead to, and how errors end a run."""

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
from mrla_mm.errors import InputError
from mrla_mm.version import __version__


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every tool that runs a config takes: work directory, overrides and launcher."""
    parser.add_argument(
        "--work-dir", help="folder for logs and checkpoints (default: work_dirs/<config name>)"
    )
    add_option_argument(parser)
    parser.add_argument(
        "--launcher",
        choices=["none", "pytorch", "slurm", "mpi"],
        default="none",
        help="job launcher",
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=0, help="set by torch.distributed.launch"
    )


def load_config(args: argparse.Namespace) -> Config:
    """Read the config of the parsed arguments and apply their overrides, launcher and work directory.

    Raises:
        InputError: there is no such config.
    """
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = (
        args.work_dir or cfg.get("work_dir") or str(Path("work_dirs") / Path(cfg.filename).stem)
    )
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the Runner, or the class that the config's `runner_type` names; on a CPU, torchrun's processes use gloo."""
    unknown_options = cfg.pop("option_warnings", ())
    cfg.mrla_mm_version = __version__
    if cfg.launcher == "pytorch" and not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo")
        unused = cfg.get("find_unused_parameters", False)
        wrapper = dict(
            type="MMDistributedDataParallel", broadcast_buffers=False, find_unused_parameters=unused
        )
        cfg.model_wrapper_cfg = {
            **wrapper,
            **(cfg.get("model_wrapper_cfg") or {}),
            "device_ids": None,
        }
    runner = RUNNERS.build(cfg)
    for line in unknown_options:
        runner.logger.warning(line)
    return runner


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Run a tool; an InputError or Ctrl-C ends it with one line on stderr, anything else keeps its traceback.

    Returns:
        The exit code: 0, 2 for an InputError, 130 for Ctrl-C.
    """
    warnings.filterwarnings(
        "ignore", message="pkg_resources is deprecated"
    )  # mmengine's concern, not the user's
    try:
        main(argv)
    except InputError as error:  # a data loading worker wraps the message into its traceback
        print(
            f"error: {str(error).rpartition('InputError: ')[2].strip()}",
            file=sys.stderr,
            flush=True,
        )  # noqa: T201
        return 2
    except KeyboardInterrupt as stop:
        print(": ".join(filter(None, ("interrupted", str(stop)))), file=sys.stderr, flush=True)  # noqa: T201
        return 130
    if torch.distributed.is_initialized():
        gc.collect()  # the wrapped model holds the process group; its threads may abort a process that ends under them
        torch.distributed.destroy_process_group()
    return 0
