#!/usr/bin/env python
"""Count parameters and multiply-adds, with no data set and no weights.

  get_flops.py CONFIG [--shape H W] [--compare CONFIG2]   one model by module, or how a second one
  differs

The unit is one multiply-add; every multiply-add and every elementwise product counts, including
those of layer attention. `mrla_mm.analysis.complexity` has the whole rule.
"""

import argparse
import sys

from mmengine.logging import MMLogger

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.inference import build_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="get_flops.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("H", "W"),
        help="image (default: 800 1280; classifiers 224 224)",
    )
    parser.add_argument(
        "--compare", metavar="CONFIG2", help="config of a second model; its difference to the first"
    )
    parser.add_argument(
        "--max-depth", type=int, default=2, help="levels of modules to show (default: 2)"
    )
    parser.add_argument(
        "--device",
        choices=["meta", "cpu"],
        default="meta",
        help="cpu: compute with real values (default: meta)",
    )
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def count(name, args):
    """Return what a config's model has and does, and the shape of the image."""
    from mrla_mm.analysis.complexity import (
        measure,
    )  # imports mmdet, which --help should not wait for

    cfg = read_config(name, args.cfg_options)
    shape = tuple(
        args.shape or ((800, 1280) if cfg.get("default_scope") == "mmdet" else (224, 224))
    )
    found = measure(build_model(cfg), shape, device=args.device)
    for operator, calls in found.unknown.items():
        print(
            f"warning: the rule does not name {operator} ({calls} calls), which is not counted",
            file=sys.stderr,
        )
    return found, shape


def show(first, second, max_depth):
    """Print parameters and multiply-adds by module, then by kind of operator; of a second model, the difference."""
    sign = "+" if second else ""
    modules, others = first.by_module(max_depth), second.by_module(max_depth) if second else {}
    print(f"{'parameters':>14} {'multiply-adds':>16}  module")
    for name in dict.fromkeys([*modules, *others]):
        parameters, operations = modules.get(name, (0, 0))
        if second:
            other = others.get(name, (0, 0))
            parameters, operations = other[0] - parameters, other[1] - operations
        if parameters or operations or not name:
            print(f"{parameters:{sign}14,} {operations / 1e9:{sign}14.4f} G  {name or 'total'}")
    print()
    kinds, others = first.by_kind(), second.by_kind() if second else {}
    for kind in dict.fromkeys([*kinds, *others]):
        operations = others.get(kind, 0) - kinds[kind] if second else kinds[kind]
        print(f"{'':14} {operations / 1e9:{sign}14.4f} G  {kind}")


def main(argv=None):
    """Count with the given command line."""
    args = parse_args(argv)
    MMLogger.get_current_instance().setLevel("WARNING")
    first, shape = count(args.config, args)
    models = {args.config: first}
    if args.compare:
        args.shape = shape
        models[args.compare], _ = count(args.compare, args)
    print(f"image: {shape[1]} x {shape[0]} (width x height)\n")
    for name, model in models.items():
        parameters = (
            f"{sum(model.parameters.values()):,} parameters, {model.trainable:,} of them trained"
        )
        print(f"{name}: {parameters}, {model.total / 1e9:.3f} G multiply-adds")
    print("\nsecond minus first:" if args.compare else "")
    show(first, models[args.compare] if args.compare else None, args.max_depth)


if __name__ == "__main__":
    sys.exit(cli.run(main))
