"""What the command line tools share: arguments, configs and models, errors."""

import argparse
import ast
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mmengine.config import Config, DictAction

from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import LoadedModel, load_model
from mrla_mm.typos import find_typo

IMAGE_SUFFIXES = [".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"]


class OptionAction(DictAction):
    """mmengine's DictAction for values that are not Python literals; strings keep their spaces."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Add options to the namespace."""
        options = dict(getattr(namespace, self.dest))
        for option in values:
            key, equals, text = option.partition("=")
            if not equals:
                parser.error(f"--cfg-options {option}: write {key}=VALUE")
            try:
                options[key] = text.strip("'\"") if key == "data_root" else self.parse_value(text)
            except (AssertionError, ValueError) as error:
                parser.error(f"--cfg-options {option}: {error}")
        setattr(namespace, self.dest, options)

    def parse_value(self, text: str) -> object:
        """Return the value of a text; raises ValueError for a list of texts with spaces."""
        try:
            value = ast.literal_eval(text.strip())
        except (SyntaxError, ValueError):
            try:
                value = self._parse_iterable(text)
            except RecursionError:  # mmengine's of a call
                raise ValueError("write a dict as {'type':'MRLALight'}") from None
            if isinstance(value, str):
                return text.strip("'\"")
            if isinstance(value, list | tuple) and re.search(r"[^\s,([] +[^\s,)\]]", text):
                raise ValueError("mmengine drops spaces in lists: put texts in quotes") from None
            return value
        is_list = isinstance(value, tuple) and not text.strip().startswith("(")
        return list(value) if is_list else value  # 1,2 is a list, as in mmengine


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cfg-options."""
    options = dict(nargs="+", action=OptionAction, default={}, metavar="KEY=VALUE")
    purpose = "override config values, e.g. train_dataloader.batch_size=4; lists as key=[1,2]"
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


def check_not_overwriting(images: Sequence[Path | str], folder: Path) -> None:
    """Raise InputError if files that have the images' names would replace them in a folder."""
    if folder.resolve() == Path(images[0]).parent.resolve():
        raise InputError(f"results would replace the images in {folder}: give another --out-dir")


def chosen_images(args: argparse.Namespace) -> list[Path]:
    """Return the images that the arguments name; make `out_dir`, InputError if it holds them."""
    images = find_images(Path(args.input), args.max_images)
    check_not_overwriting(images, args.out_dir)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    return images


def load_models(args: argparse.Namespace) -> list[LoadedModel]:
    """Return the model of the arguments and those of --compare; raises as `load_model` does."""
    first = load_model(args.config, args.checkpoint, device=args.device, options=args.cfg_options)
    compared = getattr(args, "compare", ())
    return [first, *(load_model(*pair, device=args.device) for pair in compared)]


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Run a tool and return its exit code: 0, or 2 for an InputError and 130 for Ctrl-C.

    These two end it with one line on stderr, and a reader that has gone, as of `| head`, without;
    anything else keeps its traceback.
    """
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")  # in mmengine
    try:
        main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 1
    except (InputError, KeyError, TypeError) as error:
        line = str(error) if isinstance(error, InputError) else find_typo(error)
        if not line:
            raise
        print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201
        return 2
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}".removesuffix(": "), file=sys.stderr, flush=True)  # noqa: T201
        return 130
    if torch.distributed.is_initialized():
        gc.collect()  # the wrapped model holds the group, whose threads may abort the process
        torch.distributed.destroy_process_group()
    return 0
