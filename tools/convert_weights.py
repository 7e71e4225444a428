#!/usr/bin/env python
"""Convert a weight file to our names: `python tools/convert_weights.py FILE CONFIG`."""

import argparse
import sys
from pathlib import Path

from mmengine.registry import MODELS, init_default_scope

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.weights import convert


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    weights = "file, URL or catalogue://name in any layout that init_cfg accepts"
    parser.add_argument("weights", help=weights)
    parser.add_argument("config", help="config whose model.backbone has the file's architecture")
    parser.add_argument("--out-dir", help="folder of the result (default: that of the file)")
    parser.add_argument("--name", help="name of the result before its hash (default: the file's)")
    parser.add_argument("--entry", help="entry of the file to take, e.g. model_ema")
    parser.add_argument("--prefix", help="of the backbone's keys in the file (default: found out)")
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def main(argv=None):
    """Convert with the given command line."""
    args = parse_args(argv)
    cfg = read_config(args.config, args.cfg_options)
    init_default_scope(cfg.get("default_scope") or "mmdet")
    path, report, left_out = convert(
        args.weights,
        MODELS.build({**cfg.model.backbone, "init_cfg": None}),
        folder=args.out_dir or (Path(args.weights).parent if "://" not in args.weights else "."),
        stem=args.name,
        prefix=args.prefix,
        entry=args.entry,
    )
    print(report.table())
    if left_out:
        print(f"left out, not of the backbone: {len(left_out)} tensors, {left_out[0]} first")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
