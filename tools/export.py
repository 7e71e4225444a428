#!/usr/bin/env python
"""Export a trained model to ONNX or torch.export: `python tools/export.py CONFIG CHECKPOINT`.

A detector takes images as OpenCV reads them and returns boxes, for any batch and image size;
docs/deployment.md has an example. What was written is run and compared with the model.
"""

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from mrla_mm import cli
from mrla_mm.errors import InputError
from mrla_mm.inference import load_model

ONNX = ("onnx", "onnxscript", "onnxruntime")


def parse_args(argv):
    """Parse the command line."""
    parser = cli.config_parser(__doc__)
    parser.add_argument("checkpoint", help="checkpoint file of a model of this config")
    parser.add_argument("--format", choices=["onnx", "pt2"], default="onnx", help="default: onnx")
    parser.add_argument("--backbone", action="store_true", help="the backbone alone")
    size = dict(type=int, nargs=2, metavar=("H", "W"))
    parser.add_argument("--shape", **size, help="fix the size of one image instead of any")
    parser.add_argument("--image", help="compare on this image (default: on noise)")
    out_dir = Path("work_dirs/export")
    parser.add_argument("--out-dir", type=Path, default=out_dir, help="default: %(default)s")
    return parser.parse_args(argv)


def read_image(args):
    """Return the given image as a batch, in the size of --shape if given."""
    import cv2

    image = cv2.imread(args.image)
    if image is None or args.backbone:
        raise InputError(f"--image {args.image} is not an image, or given with --backbone")
    if args.shape:
        image = cv2.resize(image, args.shape[::-1])
    return torch.from_numpy(image)[None]


def main(argv=None):
    """Export with the given command line."""
    args = parse_args(argv)
    missing = [name for name in ONNX if args.format == "onnx" and find_spec(name) is None]
    if missing:
        raise InputError(f"--format onnx needs {', '.join(missing)}: pip install {' '.join(ONNX)}")
    from mrla_mm import export

    loaded = load_model(args.config, args.checkpoint, device="cpu", options=args.cfg_options)
    graph = export.make_graph(loaded.model, args.shape, backbone_only=args.backbone)
    images = [read_image(args)] if args.image else graph.images
    args.out_dir.mkdir(parents=True, exist_ok=True)
    stem = Path(loaded.cfg.filename).stem + (".backbone" if args.backbone else "")
    path = args.out_dir / f"{stem}.{args.format}"
    with tempfile.TemporaryDirectory(dir=args.out_dir) as folder:
        unchecked = Path(folder, path.name)
        if args.format == "onnx":
            export.to_onnx(graph, unchecked, {"classes": json.dumps(loaded.classes)})
            run = export.onnx_runner(unchecked)
        else:
            torch.export.save(export.to_program(graph), unchecked)
            run = torch.export.load(unchecked).module()
        lines = [f"  {tuple(x.shape)}: {export.check_same(graph, run, x)}" for x in images]
        unchecked.replace(path)
    print(f"{path}  image {list(graph.images[0].shape)} -> {', '.join(graph.outputs)}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
