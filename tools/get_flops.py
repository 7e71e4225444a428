#!/usr/bin/env python
"""Count parameters and multiply-adds, with no data set and no weights.

  get_flops.py CONFIG [--shape H W] [--compare CONFIG2]   one model by module, or how a second one differs
  get_flops.py --paper                                    the models of the paper's tables beside its figures
  get_flops.py --resolution                               what MRLA-light adds to CeiT-T, by image size
  get_flops.py --depth                                    MLA, base and light by the depth of a stage

The unit is the multiply-add: every multiply-add and every elementwise product counts one.
"""

import argparse
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from mmengine.logging import MMLogger

from mrla_mm import cli, outputs
from mrla_mm.analysis import complexity, paper, sweeps
from mrla_mm.analysis.benchmark import as_markdown
from mrla_mm.errors import InputError
from mrla_mm.trained import build_model

SIZES = (224, 256, 288, 320, 384, 448, 512, 640)
DEPTHS = (1, 2, 4, 6, 8, 12, 16, 23, 36)


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
    parser.add_argument("--resolution", action="store_true", help="what MRLA-light adds to CeiT-T, by image size")
    parser.add_argument("--depth", action="store_true", help="MLA, base and light by the depth of a stage")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("work_dirs/complexity"), help="folder for tables and plots"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )
    args = parser.parse_args(argv)
    if sum([args.config is not None, args.paper, args.resolution, args.depth]) != 1:
        raise InputError("give a CONFIG, or one of --paper, --resolution and --depth")
    if args.only and not args.paper:
        raise InputError("--only chooses among the models of --paper")
    if args.shape and min(args.shape) < 1:
        raise InputError(f"--shape {args.shape[0]} {args.shape[1]}: give a positive height and width")
    if args.max_depth < 0:
        raise InputError(f"--max-depth {args.max_depth}: give 0, for the whole model alone, or more")
    if args.compare and args.config is None:
        raise InputError("--compare needs a CONFIG to compare with")
    return args


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


def show_resolution(args):
    """Print, write and draw what MRLA-light adds to CeiT-T by image size: the paper's complexity figure."""
    plain, attended = (f"mrla_mm::imagenet/ceit_tiny{suffix}_8xb128.py" for suffix in ("", "_mrla_light"))
    points = sweeps.by_resolution(lambda: build(plain)[0], lambda: build(attended)[0], SIZES)
    slope, offset, explained = complexity.fit_line(*zip(*points, strict=True))
    rows = [
        {"image": f"{size} x {size}", "pixels": str(pixels), "added [G]": f"{added:.5f}"}
        for size, (pixels, added) in zip(SIZES, points, strict=True)
    ]
    fit = f"fitted line: {slope * 1e9:.2f} multiply-adds a pixel {offset * 1e9:+,.0f}; R^2 = {explained:.7f}"
    picture = sweeps.plot_resolution(points, args.out_dir / "resolution.png", title="MRLA-light on CeiT-T")
    write(args.out_dir / "resolution.md", f"{complexity.RULE}\n\n{as_markdown(rows)}\n\n{fit}\n", picture)


def show_depth(args):
    """Print, write and draw MLA, base and light by the depth of a stage."""
    series = sweeps.by_depth(DEPTHS)
    rows = [
        {"layers": str(depth)} | {f"{name} [G]": f"{points[index][1]:.4f}" for name, points in series.items()}
        for index, depth in enumerate(DEPTHS)
    ]
    title = "layer attention in a stage of T layers, 1024 x 14 x 14"
    picture = sweeps.plot_depth(series, args.out_dir / "depth.png", title=title)
    write(args.out_dir / "depth.md", f"{complexity.RULE}\n\n{title}\n\n{as_markdown(rows)}\n", picture)


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
    elif args.resolution:
        show_resolution(args)
    elif args.depth:
        show_depth(args)
    else:
        show_config(args)


if __name__ == "__main__":
    sys.exit(cli.run(main))
