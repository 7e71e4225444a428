#!/usr/bin/env python
"""Detect objects in images: `python tools/demo.py INPUTS CONFIG --weights CHECKPOINT`.

It runs mmdet's DetInferencer with the arguments of its image_demo.py. Weights must be those of the
config's model, all of them.
"""

import argparse
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.config import device_name
from mrla_mm.errors import InputError
from mrla_mm.inference import load_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__.partition(":")[0])
    parser.add_argument("inputs", help="image file or URL, or folder of images")
    parser.add_argument("model", help="config file, or package::name of a packed one")
    parser.add_argument("--weights", required=True, help="checkpoint file or URL")
    parser.add_argument(
        "--out-dir", default="outputs", help="folder for vis/ and preds/ (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        type=device_name,
        help="cpu, cuda, cuda:1, ... (default: cuda where there is one)",
    )
    parser.add_argument(
        "--pred-score-thr",
        type=float,
        default=0.3,
        help="lowest score to draw (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, help="images at a time (default: %(default)s)"
    )
    parser.add_argument("--show", action="store_true", help="show each picture in a window")
    parser.add_argument("--no-save-vis", action="store_true", help="do not save the pictures")
    parser.add_argument("--no-save-pred", action="store_true", help="do not save the detections")
    parser.add_argument("--print-result", action="store_true", help="print the detections")
    parser.add_argument(
        "--palette",
        default="none",
        help="coco, voc, citys, random or a colour (default: the data's)",
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Run the detector over the inputs."""
    options = vars(parse_args(argv))
    if "://" not in options["inputs"] and not Path(options["inputs"]).exists():
        raise InputError(f"{options['inputs']} does not exist: name an image or a folder of images")
    from mmdet.apis import DetInferencer

    weights = options.pop("weights")
    trained = load_model(options.pop("model"), weights, device="cpu")
    inferencer = DetInferencer(
        trained.cfg, weights, options.pop("device"), palette=options.pop("palette")
    )
    # Of other keys mmengine loads a part, or nothing.
    inferencer.model.load_state_dict(trained.model.state_dict())
    found = inferencer(**options)["predictions"]
    print(f"{len(found)} images; results are in {options['out_dir']}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
