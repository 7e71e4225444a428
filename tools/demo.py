#!/usr/bin/env python
"""Detect objects in images with mmdet's DetInferencer: `python tools/demo.py INPUTS CONFIG --weights CHECKPOINT`.

The arguments are those of mmdet's image_demo.py. Weights must be those of the config's model, all
of them.
"""

import argparse
import sys

from mrla_mm import cli
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
        "--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)"
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
    from mmdet.apis import DetInferencer

    weights, device = options.pop("weights"), options.pop("device")
    trained = load_model(options.pop("model"), weights, device="cpu")
    inferencer = DetInferencer(trained.cfg, weights, device, palette=options.pop("palette"))
    inferencer.model.load_state_dict(
        trained.model.state_dict()
    )  # of other keys mmengine loads a part, or nothing
    found = inferencer(**options)["predictions"]
    print(f"{len(found)} images; results are in {options['out_dir']}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
