#!/usr/bin/env python
"""Export a trained model: `python tools/export.py CONFIG CHECKPOINT --format onnx --dynamic`.

A backbone, a classifier or a single-stage detector becomes one graph, a two-stage detector `dense`, `boxes` and
`masks`; docs/deployment.md says what each takes and gives. Every graph is run (ONNX in onnxruntime) and compared with
the model: a difference above 1e-4 of the largest output, or of 1, ends with an error.
"""

import argparse
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch

from mrla_mm import cli, export, outputs
from mrla_mm.errors import InputError
from mrla_mm.trained import load_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file of a model of this config")
    parser.add_argument("--format", choices=["onnx", "export"], default="onnx", help="ONNX, or torch.export's .pt2")
    parser.add_argument("--dynamic", action="store_true", help="for any batch and image size, not for one of each")
    parser.add_argument("--backbone", action="store_true", help="the backbone alone, for any kind of model")
    parser.add_argument(
        "--shape", type=int, nargs=2, metavar=("H", "W"), help="image (default: 800 1344; classifiers 224 224)"
    )
    parser.add_argument(
        "--opset", type=int, help=f"of ONNX, {export.OPSETS[0]} to {export.OPSETS[-1]} (default: {export.OPSET})"
    )
    parser.add_argument("--out-dir", type=Path, default=Path("work_dirs/export"), help="folder for the files")
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )
    args = parser.parse_args(argv)
    if args.shape and min(args.shape) < 32:
        raise InputError(f"--shape {args.shape[0]} {args.shape[1]}: give a height and width of at least 32")
    if args.opset is not None and args.format != "onnx":
        raise InputError(f"--opset {args.opset}: opsets are ONNX's, drop it with --format {args.format}")
    args.opset = export.OPSET if args.opset is None else args.opset
    if args.format == "onnx":
        export.check_onnx(args.opset)
    return args


def facts_for_users(model, cfg):
    """Return what a user of the files must know and the graph does not say: normalisation of the image, classes."""
    preprocessor = model.data_preprocessor
    facts = {"config": Path(cfg.filename).stem}
    if getattr(preprocessor, "_enable_normalize", False):
        facts["mean"], facts["std"] = (str(getattr(preprocessor, name).flatten().tolist()) for name in ("mean", "std"))
    converts = getattr(preprocessor, "_channel_conversion", getattr(preprocessor, "to_rgb", False))
    facts["channels"] = "RGB" if converts else "as read, BGR with OpenCV"
    return {f"mrla_mm.{name}": value for name, value in facts.items()}


def trial_inputs(graph, args, shape):
    """Return the inputs to compare with the model on: the example, and for moving axes two that differ from it."""
    if not args.dynamic:
        return [graph.inputs]
    larger, wider = (shape[0] + 32, shape[1] + 64), (shape[0], shape[1] + 32)
    return [graph.inputs, export.other_inputs(graph, larger, 3), export.other_inputs(graph, wider, 1)]


def write(graph, path, args, facts):
    """Write a graph; return a function that runs what was written, and what it is."""
    if args.format == "onnx":
        export.to_onnx(graph, path, dynamic=args.dynamic, opset=args.opset, metadata=facts)
        return export.in_onnxruntime(graph, path), f"opset {export.opset_of(path)}"
    torch.export.save(export.to_program(graph, dynamic=args.dynamic), path)
    return torch.export.load(path).module(), "torch.export"


def main(argv=None):
    """Export with the given command line."""
    args = parse_args(argv)
    outputs.make_folder(args.out_dir)
    model, cfg, _ = load_model(args.config, args.checkpoint, device="cpu", options=args.cfg_options)
    shape = tuple(args.shape or ((224, 224) if cfg.get("default_scope") == "mmpretrain" else (800, 1344)))
    facts = facts_for_users(model, cfg)
    for name, graph in export.graphs_of(model, shape, backbone_only=args.backbone).items():
        path = args.out_dir / f"{Path(cfg.filename).stem}.{name}.{'onnx' if args.format == 'onnx' else 'pt2'}"
        run, kind = write(graph, path, args, facts)
        worst = max(export.deviation(graph, run, inputs) for inputs in trial_inputs(graph, args, shape))
        size = path.stat().st_size / 2**20
        print(f"{path}  {kind}  {size:.1f} MiB  {', '.join(graph.input_names)} -> {', '.join(graph.output_names)}")
        print(f"  largest difference to the model: {worst:.1e}")
        if not worst <= export.TOLERANCE:
            raise InputError(
                f"{path} does not compute what the model does: {worst:.1e} is above {export.TOLERANCE:.0e}"
            )
    print("; ".join(f"{key} {value}" for key, value in facts.items()))


if __name__ == "__main__":
    sys.exit(cli.run(main))
