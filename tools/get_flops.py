#!/usr/bin/env python
"""Count parameters and multiply-adds, with no data set and no weights.

  get_flops.py CONFIG [--shape H W] [--compare CONFIG2]

Every multiply-add and every elementwise product counts as one, including those of layer attention;
`mrla_mm.analysis.complexity` has the whole rule. With --compare the tables show how the second
model differs.
"""

import sys
from collections import Counter

from mmengine.logging import MMLogger

from mrla_mm import cli
from mrla_mm.analysis.complexity import measure
from mrla_mm.attention import MLA
from mrla_mm.config import read_config
from mrla_mm.inference import build_model


def parse_args(argv):
    """Parse the command line."""
    parser = cli.config_parser(__doc__)
    size = dict(type=int, nargs=2, metavar=("H", "W"))
    parser.add_argument("--shape", **size, help="image (default: 800 1280; classifiers 224 224)")
    parser.add_argument("--compare", metavar="CONFIG2", help="config of a second model")
    parser.add_argument("--max-depth", type=int, default=2, help="levels of modules (default: 2)")
    devices = dict(choices=["meta", "cpu"], default="meta")
    parser.add_argument("--device", **devices, help="cpu: compute real values (default: meta)")
    return parser.parse_args(argv)


def count(name, args):
    """Return the complexity of a config's model, and the shape of the image it was counted for."""
    model = build_model(read_config(name, args.cfg_options))
    default = (800, 1280) if hasattr(model, "with_bbox") else (224, 224)
    shape = tuple(args.shape or default)
    found = measure(model, shape, device=args.device)
    for operator, calls in found.unknown.items():
        message = f"warning: {operator} is not one of torch's and not counted ({calls} calls)"
        print(message, file=sys.stderr)
    if any(isinstance(module, MLA) for module in model.modules()):
        print("MLA is counted as the paper writes it: each layer convolves every earlier map.")
        print("It runs with one convolution of their weighted sum, which is the same.")
    parameters = f"{sum(found.parameters.values()):,} parameters, {found.trainable:,} trainable"
    print(f"{name}: {parameters}, {found.total / 1e9:.3f} G multiply-adds")
    return found, shape


def difference(second, first):
    """Return the complexity of a second model minus that of a first."""
    parameters, operations = Counter(second.parameters), Counter(second.operations)
    parameters.subtract(first.parameters)
    operations.subtract(first.operations)
    return second._replace(parameters=parameters, operations=operations)


def show(found, max_depth, sign):
    """Print parameters and multiply-adds by module, then multiply-adds by kind of operator."""
    print(f"\n{'parameters':>14} {'multiply-adds':>16}  module")
    for name, (parameters, operations) in found.by_module(max_depth).items():
        if parameters or operations or not name:
            print(f"{parameters:{sign}14,} {operations / 1e9:{sign}14.4f} G  {name or 'total'}")
    print()
    for kind, operations in found.by_kind().items():
        print(f"{'':14} {operations / 1e9:{sign}14.4f} G  {kind}")


def main(argv=None):
    """Count with the given command line."""
    args = parse_args(argv)
    MMLogger.get_current_instance().setLevel("WARNING")
    found, args.shape = count(args.config, args)
    if args.compare:
        second, _ = count(args.compare, args)
        found = difference(second, found)
        print("\nsecond minus first:")
    print(f"image: {args.shape[1]} x {args.shape[0]} (width x height)")
    show(found, args.max_depth, "+" if args.compare else "")


if __name__ == "__main__":
    sys.exit(cli.run(main))
