#!/usr/bin/env python
"""Export a trained model: `python tools/export.py CONFIG CHECKPOINT --format onnx --dynamic`.

A backbone, a classifier or a single-stage detector becomes one graph, a two-stage detector `dense`,
`boxes` and `masks`; docs/deployment.md says what each takes and gives. Every graph is run (ONNX in
onnxruntime) and compared with the model: a difference above 1e-4 of the largest output, or of 1,
ends with an error.
"""

import argparse
import sys
from pathlib import Path

import torch

from mrla_mm import cli
from mrla_mm.config import add_option_argument
from mrla_mm.errors import InputError
from mrla_mm.inference import load_model


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file of a model of this config")
    parser.add_argument(
        "--format", choices=["onnx", "export"], default="onnx", help="ONNX, or torch.export's .pt2"
    )
    parser.add_argument(
        "--dynamic", action="store_true", help="for any batch and image size, not for one of each"
    )
    parser.add_argument(
        "--backbone", action="store_true", help="the backbone alone, for any kind of model"
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("H", "W"),
        help="image (default: 800 1344; classifiers 224 224)",
    )
    parser.add_argument("--opset", type=int, help="of ONNX (default: that of mrla_mm.export)")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("work_dirs/export"), help="folder for the files"
    )
    add_option_argument(parser)
    return parser.parse_args(argv)


def facts_for_users(model, cfg):
    """Return what a user of the files must know and the graph does not say: how the image is normalised."""
    preprocessor = model.data_preprocessor
    facts = {"config": Path(cfg.filename).stem}
    if getattr(preprocessor, "_enable_normalize", False):
        facts["mean"], facts["std"] = (
            str(getattr(preprocessor, name).flatten().tolist()) for name in ("mean", "std")
        )
    converts = getattr(preprocessor, "_channel_conversion", getattr(preprocessor, "to_rgb", False))
    facts["channels"] = "RGB" if converts else "as read, BGR with OpenCV"
    return {f"mrla_mm.{name}": value for name, value in facts.items()}


def write(graph, path, args, facts):
    """Write a graph and return a function that runs what was written."""
    from mrla_mm import export

    if args.format == "onnx":
        export.to_onnx(
            graph, path, dynamic=args.dynamic, opset=args.opset or export.OPSET, metadata=facts
        )
        return export.onnx_runner(graph, path)
    torch.export.save(export.to_program(graph, dynamic=args.dynamic), path)
    return torch.export.load(path).module()


def main(argv=None):
    """Export with the given command line."""
    args = parse_args(argv)
    from mrla_mm import export

    args.out_dir.mkdir(parents=True, exist_ok=True)
    model, cfg, _ = load_model(args.config, args.checkpoint, device="cpu", options=args.cfg_options)
    height, width = args.shape or (
        (224, 224) if cfg.get("default_scope") == "mmpretrain" else (800, 1344)
    )
    facts = facts_for_users(model, cfg)
    for name, graph in export.graphs_of(
        model, (height, width), backbone_only=args.backbone
    ).items():
        path = (
            args.out_dir
            / f"{Path(cfg.filename).stem}.{name}.{'onnx' if args.format == 'onnx' else 'pt2'}"
        )
        run = write(graph, path, args, facts)
        others = [((height + 32, width + 64), 3), ((height, width + 32), 1)] if args.dynamic else []
        trials = [
            graph.inputs,
            *(export.other_inputs(graph, shape, batch) for shape, batch in others),
        ]
        worst = max(export.deviation(graph, run, inputs) for inputs in trials)
        print(f"{path}  {', '.join(graph.input_names)} -> {', '.join(graph.output_names)}")
        print(f"  largest difference to the model: {worst:.1e}")
        if not worst <= export.TOLERANCE:
            raise InputError(
                f"{path} does not compute what the model does: the difference is {worst:.1e}"
            )
    print("; ".join(f"{key} {value}" for key, value in facts.items()))


if __name__ == "__main__":
    sys.exit(cli.run(main))
