#!/usr/bin/env python
"""Detect objects in images with mmdet's DetInferencer.

The arguments are those of mmdet's image_demo.py. All weights of the model must be in the file.
Without a config, it is the detector of blood cells in a clone of the repository.
"""

import argparse
import sys
import warnings
from pathlib import Path

import mmcv

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.datasets.coco_checks import find_repeated
from mrla_mm.errors import InputError
from mrla_mm.inference import class_names
from mrla_mm.weights import load_weights

CELLS = Path(__file__).resolve().parents[1] / "configs/quickstart/blood_cells/blood_cells.py"


def parse_args(argv):
    """Parse the command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    text = "image file or URL, or folder of images; by default one of blood cells"
    parser.add_argument("inputs", nargs="?", default=str(CELLS.with_name("image.jpg")), help=text)
    text = "config file, or package::name of a packed one"
    parser.add_argument("model", nargs="?", default=str(CELLS), help=text)
    parser.add_argument("--weights", help="checkpoint file or URL; needed with a config")
    parser.add_argument("--out-dir", default="outputs", help="folder for vis/ and preds/")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; a GPU if there is one")
    parser.add_argument("--pred-score-thr", type=float, default=0.3, help="lowest score to draw")
    parser.add_argument("--batch-size", type=int, default=1, help="images at a time")
    parser.add_argument("--show", action="store_true", help="show each picture in a window")
    parser.add_argument("--no-save-vis", action="store_true", help="do not save the pictures")
    parser.add_argument("--no-save-pred", action="store_true", help="do not save the detections")
    parser.add_argument("--print-result", action="store_true", help="print the detections")
    parser.add_argument("--palette", default="none", help="coco, voc, citys, random or a colour")
    args = parser.parse_args(argv)
    if args.model == str(CELLS) and CELLS.with_suffix(".pth").is_file():  # not in a wheel
        args.weights = args.weights or str(CELLS.with_suffix(".pth"))
    if args.weights is None:
        parser.error(f"--weights is needed: the checkpoint of {args.model}")
    return args


def readable_images(source):
    """Return the paths of an image or of those in a folder; InputError if one cannot be read."""
    paths = cli.find_images(source)
    if shared := find_repeated(path.stem for path in paths):
        raise InputError(f"{source}: two images share preds/{shared[0]}.json: rename one of them")
    for path in paths:  # OpenCV's error has no name in it
        if not path.stat().st_size or mmcv.imread(path) is None:
            raise InputError(f"image {path} is empty or cannot be decoded: replace it")
    return [str(path) for path in paths]


def main(argv=None):
    """Run the detector over the inputs."""
    options = vars(parse_args(argv))
    if "://" not in options["inputs"]:
        options["inputs"] = readable_images(Path(options["inputs"]))
        cli.check_not_overwriting(options["inputs"], Path(options["out_dir"], "vis"))
    from mmdet.apis import DetInferencer  # after mrla_mm, whose operators it needs

    weights = options.pop("weights")
    device = options.pop("device")
    palette = options.pop("palette")
    cfg = read_config(options.pop("model"), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no weights yet: its loading is not strict
        inferencer = DetInferencer(cfg, None, device, palette=palette)
    report = load_weights(inferencer.model, weights)
    classes = class_names(report.meta, cfg)
    if classes:
        inferencer.model.dataset_meta["classes"] = classes
    found = inferencer(**options)["predictions"]
    print(f"{len(found)} images; results are in {options['out_dir']}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
