#!/usr/bin/env python
"""Strip a training checkpoint to its weights: `python tools/publish_weights.py IN.pth OUT.pth`.

As mmdet's publish_model.py does, it writes the first digits of the file's SHA-256 into its name:
OUT-<hash>.pth.
"""

import argparse
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.weights import publishable, read_checkpoint, save_published, stem_of


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("in_file", help="training checkpoint: file, URL or catalogue://name")
    parser.add_argument("out_file", type=Path, help="file to write, whose name gets the hash")
    return parser.parse_args(argv)


def main(argv=None):
    """Publish with the given command line."""
    args = parse_args(argv)
    clean, left = publishable(read_checkpoint(args.in_file))
    path = save_published(clean, args.out_file.parent, stem_of(args.out_file))
    print(f"kept {len(clean['state_dict'])} tensors and meta ({', '.join(clean['meta'])})")
    print(f"left behind: {', '.join(left) or 'nothing'}")
    print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    sys.exit(cli.run(main))
