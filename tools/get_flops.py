#!/usr/bin/env python
"""Count parameters and multiply-adds, with no data set and no weights.

  get_flops.py CONFIG [--shape H W] [--compare CONFIG2]   one model by module, or how a second one differs
  get_flops.py --paper                                    the models of the paper's tables beside its figures

The unit is the multiply-add: every multiply-add and every elementwise product counts one.
"""

import argparse
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from mmengine.logging import MMLogger

from mrla_mm import cli, outputs
from mrla_mm.analysis import complexity, paper
from mrla_mm.errors import InputError
from mrla_mm.trained import build_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="get_flops.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="config file, or package::name of a packed one")
    parser.add_argument(
        "--shape", type=int, nargs=2, metavar=("H", "W"), help="image (default: 800 1280; classifiers 224 224)"
    )
    parser.add_argument("--compare", metavar="CONFIG2", help="config of a second model; its difference to the first")
    parser.add_argument("--max-depth", type=int, default=2, help="levels of modules to show (default: 2)")
    parser.add_argument(
        "--device", choices=["meta", "cpu"], default="meta", help="cpu: compute for real (default: meta)"
    )
    parser.add_argument("--paper", action="store_true", help="every model of the paper's tables that the package has")
    parser.add_argument("--only", metavar="TEXT", help="with --paper: models whose name contains this")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("work_dirs/complexity"), help="folder for tables and plots"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )
    args = parser.parse_args(argv)
    if (args.config is not None) == args.paper:
        raise InputError("give a CONFIG or --paper")
    if args.only and not args.paper:
        raise InputError("--only chooses among the models of --paper")
    if args.shape and min(args.shape) < 1:
        raise InputError(f"--shape {args.shape[0]} {args.shape[1]}: give a positive height and width")
    if args.max_depth < 0:
        raise InputError(f"--max-depth {args.max_depth}: give 0, for the whole model alone, or more")
    if args.compare and args.config is None:
        raise InputError("--compare needs a CONFIG to compare with")
    return args


def as_markdown(rows):
    """Rows as a Markdown table; the columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(column, "") for column in columns] for row in rows]
    shown = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *shown])


def build(name, options=None):
    """Return the model of a config, without pretrained weights, and the config."""
    cfg = cli.read_config(name, options or {})
    return build_model(cfg, name), cfg


def count(name, args):
    """Return what a config's model has and does, and the image's shape."""
    model, cfg = build(name, args.cfg_options)
    shape = tuple(args.shape or ((800, 1280) if cfg.get("default_scope") == "mmdet" else (224, 224)))
    found = complexity.measure(model, shape, device=args.device)
    for operator, calls in found.unknown.items():
        print(f"warning: the rule does not name {operator} ({calls} calls), which is not counted", file=sys.stderr)
    return found, shape


def show_config(args):
    """Print one model by module, or how a second one differs from it."""
    found, shape = count(args.config, args)
    print(f"{complexity.RULE}\n\nimage: {shape[1]} x {shape[0]} (width x height)\n")
    if args.compare is None:
        print(as_markdown(complexity.module_rows(found, max_depth=args.max_depth)), end="\n\n")
        print(as_markdown(complexity.kind_rows(found)))
        print(f"\nof {found.total_parameters:,} parameters {found.trainable:,} are trained")
        return
    args.shape = shape
    other, _ = count(args.compare, args)
    for name, model in ((args.config, found), (args.compare, other)):
        print(f"{name}: {model.total_parameters:,} parameters, {model.total / 1e9:.3f} G multiply-adds")
    print(
        f"\nsecond minus first:\n\n{as_markdown(complexity.comparison_rows(found, other, max_depth=args.max_depth))}\n"
    )
    print(as_markdown(complexity.kind_rows(found, other)))


def show_paper(args):
    """Print and write the models of the paper's tables beside its figures."""
    rows = [row for row in paper.ROWS if (args.only or "").lower() in row.model.lower()]
    if not rows:
        raise InputError(f"--only {args.only}: no model of the paper's tables is called so")
    counted = {}

    def counted_once(row):
        key = row.config, row.shape, tuple(row.options.items())
        if key not in counted:
            print(f"counting {row.model} ...", file=sys.stderr, flush=True)
            model, _ = build(f"mrla_mm::{row.config}.py", row.options)
            counted[key] = complexity.measure(model, row.shape)
        return counted[key]

    lines = []
    for row in rows:
        plain = paper.plain_row(row)
        lines.append(paper.compare(row, counted_once(row), counted_once(plain) if plain else None))
    write(args.out_dir / "paper.md", f"{complexity.RULE}\n\n{as_markdown(lines)}\n\n{paper.NOTES}")


def write(path, text, *pictures):
    """Print a text and write it to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {', '.join(str(name) for name in (path, *pictures))}")


def main(argv=None):
    """Count with the given command line."""
    args = parse_args(argv)
    MMLogger.get_current_instance().setLevel("WARNING")
    if args.config is None:
        outputs.make_folder(args.out_dir)
    if args.paper:
        show_paper(args)
    else:
        show_config(args)


if __name__ == "__main__":
    sys.exit(cli.run(main))
