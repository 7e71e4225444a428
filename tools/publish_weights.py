#!/usr/bin/env python
"""Strip a training checkpoint to its weights: `python tools/publish_weights.py work_dirs/run/epoch_12.pth`."""

import argparse
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported
from mrla_mm import cli
from mrla_mm.weights import publishable, read_checkpoint, save_published, stem_of


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="publish_weights.py", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="training checkpoint: file, URL or catalogue://name")
    parser.add_argument("--out-dir", help="folder of the result (default: that of the checkpoint)")
    parser.add_argument("--name", help="name of the result before its hash (default: the checkpoint's)")
    return parser.parse_args(argv)


def main(argv=None):
    """Publish with the given command line."""
    args = parse_args(argv)
    clean, left = publishable(read_checkpoint(args.checkpoint))
    folder = args.out_dir or (Path(args.checkpoint).parent if "://" not in args.checkpoint else ".")
    path = save_published(clean, folder, args.name or stem_of(args.checkpoint))
    print(f"kept {len(clean['state_dict'])} tensors and meta ({', '.join(clean['meta'])})")
    print(f"left behind: {', '.join(left) or 'nothing'}")
    print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    sys.exit(cli.run(main))
