#!/usr/bin/env python
"""Detect objects in images with mmdet's DetInferencer.

The arguments are those of mmdet's image_demo.py. All weights of the model must be in the file.
"""

import argparse
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.config import device_name, read_config
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights
from mrla_mm.weights.files import read_checkpoint


def parse_args(argv):
    """Parse the command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("inputs", help="image file or URL, or folder of images")
    parser.add_argument("model", help="config file, or package::name of a packed one")
    parser.add_argument("--weights", required=True, help="checkpoint file or URL")
    parser.add_argument("--out-dir", default="outputs", help="folder for vis/ and preds/")
    device = dict(type=device_name, help="cpu, cuda, cuda:1, ...; a GPU if there is one")
    parser.add_argument("--device", **device)
    parser.add_argument("--pred-score-thr", type=float, default=0.3, help="lowest score to draw")
    parser.add_argument("--batch-size", type=int, default=1, help="images at a time")
    parser.add_argument("--show", action="store_true", help="show each picture in a window")
    parser.add_argument("--no-save-vis", action="store_true", help="do not save the pictures")
    parser.add_argument("--no-save-pred", action="store_true", help="do not save the detections")
    parser.add_argument("--print-result", action="store_true", help="print the detections")
    parser.add_argument("--palette", default="none", help="coco, voc, citys, random or a colour")
    return parser.parse_args(argv)


def main(argv=None):
    """Run the detector over the inputs."""
    options = vars(parse_args(argv))
    if "://" not in options["inputs"] and not Path(options["inputs"]).exists():
        raise InputError(f"there is no image or folder {options['inputs']}")
    from mmdet.apis import DetInferencer

    weights, device, palette = (options.pop(key) for key in ("weights", "device", "palette"))
    cfg = read_config(options.pop("model"), {})
    read_checkpoint(weights)  # says what is wrong with a file, where mmengine only fails
    inferencer = DetInferencer(cfg, weights, device, palette=palette)
    load_weights(inferencer.model, weights)  # mmengine leaves out keys that do not match
    found = inferencer(**options)["predictions"]
    print(f"{len(found)} images; results are in {options['out_dir']}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
