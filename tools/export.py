#!/usr/bin/env python
"""Export a trained model to ONNX or torch.export: `python tools/export.py CONFIG CHECKPOINT`.

A graph returns what comes before post-processing: a backbone's maps, a classifier's logits, or the
maps of a one-stage detector's head; docs/deployment.md decodes them. What was written is run and
compared with the model.
"""

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from mrla_mm import cli, export
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
    out_dir = Path("work_dirs/export")
    parser.add_argument("--out-dir", type=Path, default=out_dir, help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv=None):
    """Export with the given command line."""
    args = parse_args(argv)
    missing = [name for name in ONNX if args.format == "onnx" and find_spec(name) is None]
    if missing:
        raise InputError(f"--format onnx needs {', '.join(missing)}: pip install {' '.join(ONNX)}")
    loaded = load_model(args.config, args.checkpoint, device="cpu", options=args.cfg_options)
    module = export.select_module(loaded.model, backbone_only=args.backbone)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    stem = Path(loaded.cfg.filename).stem + (".backbone" if args.backbone else "")
    path = args.out_dir / f"{stem}.{args.format}"
    with tempfile.TemporaryDirectory(dir=args.out_dir) as folder:
        unchecked = Path(folder, path.name)
        if args.format == "onnx":
            classes = json.dumps(loaded.classes)
            export.to_onnx(module, unchecked, args.shape, {"classes": classes})
            run = export.onnx_runner(unchecked)
        else:
            torch.export.save(export.to_program(module, args.shape), unchecked)
            run = torch.export.load(unchecked).module()
        for image in export.random_images(args.shape):
            difference = export.check_same(module, run, image)
            print(f"image {list(image.shape)}: largest difference to the model {difference:.1e}")
        unchecked.replace(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
