"""What the command line tools share: arguments, what they name, and how errors end a run."""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mrla_mm.config import read_config
from mrla_mm.datasets.checks import check_data
from mrla_mm.errors import InputError
from mrla_mm.inference import LoadedModel, load_model
from mrla_mm.version import __version__

IMAGE_SUFFIXES = [".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"]


class OptionAction(DictAction):
    """mmengine's DictAction, but that a text keeps its spaces."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Add options to the namespace."""
        super().__call__(parser, namespace, values, option_string)
        options = getattr(namespace, self.dest)
        for option in values:
            key, _, text = option.partition("=")
            if key == "data_root" or isinstance(options[key], str):
                options[key] = text.strip("'\"")


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cfg-options."""
    options = dict(nargs="+", action=OptionAction, default={}, metavar="KEY=VALUE")
    purpose = "override config values, e.g. train_dataloader.batch_size=4; lists as key=[a,b]"
    parser.add_argument("--cfg-options", **options, help=purpose)


def config_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of a tool that reads a config, with overrides."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind)
    parser.add_argument("config", help="config file, or package::name of a packed one")
    add_option_argument(parser)
    return parser


def add_compile_argument(parser: argparse.ArgumentParser) -> None:
    """Add --compile."""
    purpose = "compile the backbone with torch.compile; the first images take a minute or more"
    parser.add_argument("--compile", action="store_true", help=purpose)


def compile_backbone(cfg: Config) -> None:
    """Let the runner of a config compile the backbone."""
    hooks = list(cfg.get("custom_hooks") or [])
    cfg.custom_hooks = [*hooks, dict(type="CompileBackboneHook")]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every tool that runs a config takes: work directory and launcher."""
    folder = "folder for logs and checkpoints (default: work_dirs/<config name>)"
    parser.add_argument("--work-dir", help=folder)
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    rank = "set by torch.distributed.launch"
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=rank)


def load_config(args: argparse.Namespace) -> Config:
    """Read the config of the parsed arguments and apply their overrides."""
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or f"work_dirs/{Path(cfg.filename).stem}"
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


def picture_parser(name: str, description: str, *, compare: bool) -> argparse.ArgumentParser:
    """Return the parser of a tool that runs a model, or several to compare, over images."""
    parser = config_parser(description)
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument("input", help="image file, or folder of images")
    out_dir = Path("work_dirs", name.removeprefix("visualize_"))
    parser.add_argument("--out-dir", type=Path, default=out_dir, help="default: %(default)s")
    parser.add_argument("--format", choices=["png", "svg", "pdf"], default="png", help="of files")
    parser.add_argument("--max-images", type=int, help="take at most so many images of a folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    if compare:
        pair = dict(nargs=2, metavar=("CONFIG", "CHECKPOINT"), action="append", default=[])
        purpose = "draw another model beside it, without --cfg-options; may be repeated"
        parser.add_argument("--compare", **pair, help=purpose)
    return parser


def find_images(source: Path, limit: int | None = None) -> list[Path]:
    """Return an image file, or the images in a folder but hidden ones; InputError for neither."""
    found = sorted(path for path in source.glob("[!.]*") if path.suffix.lower() in IMAGE_SUFFIXES)
    images = [source] if source.is_file() else found[:limit]
    if not images:
        raise InputError(f"{source}: neither an image nor a folder of {', '.join(IMAGE_SUFFIXES)}")
    return images


def chosen_images(args: argparse.Namespace) -> list[Path]:
    """Return the images that the arguments name; make `out_dir`, InputError if it holds them."""
    images = find_images(Path(args.input), args.max_images)
    if args.out_dir.resolve() == images[0].parent.resolve():
        raise InputError(f"--out-dir {args.out_dir} holds the input: give another folder")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    return images


def load_models(args: argparse.Namespace) -> list[LoadedModel]:
    """Return the model of the arguments and those of --compare; raises as `load_model` does."""
    first = load_model(args.config, args.checkpoint, device=args.device, options=args.cfg_options)
    compared = getattr(args, "compare", ())
    return [first, *(load_model(*pair, device=args.device) for pair in compared)]


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Run a tool and return its exit code: 0, or 2 for an InputError and 130 for Ctrl-C.

    These two end it with one line on stderr; anything else keeps its traceback.
    """
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")  # in mmengine
    try:
        main(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 2
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}".removesuffix(": "), file=sys.stderr, flush=True)  # noqa: T201
        return 130
    if torch.distributed.is_initialized():
        gc.collect()  # the wrapped model holds the group, whose threads may abort the process
        torch.distributed.destroy_process_group()
    return 0
