#!/usr/bin/env python
"""Evaluate a checkpoint: `python tools/test.py CONFIG CHECKPOINT`."""

import copy
import sys
from pathlib import Path

from mmengine.registry import METRICS

from mrla_mm import cli, training
from mrla_mm.errors import InputError
from mrla_mm.inference import get_test_dataset


def parse_args(argv):
    """Parse the command line."""
    parser = cli.config_parser("Evaluate a checkpoint.")
    parser.add_argument("checkpoint", help="checkpoint file or URL")
    parser.add_argument("--out", metavar="FILE.pkl", help="also pickle the raw predictions")
    parser.add_argument("--show", action="store_true", help="show the predictions in a window")
    parser.add_argument("--show-dir", help="paint predictions to <work dir>/<timestamp>/SHOW_DIR")
    parser.add_argument("--wait-time", type=float, default=2, help="seconds between shown images")
    cli.add_compile_argument(parser)
    parser.add_argument("--tta", action="store_true", help="test-time augmentation")
    cli.add_run_arguments(parser)
    return parser.parse_args(argv)


def enable_visualization(cfg, args):
    """Let the config's visualization hook paint every test image into a window or a folder."""
    hook = cfg.default_hooks.visualization
    is_detector = "DetVisualizationHook" in str(hook.type)
    hook["draw" if is_detector else "enable"] = True
    hook.update(interval=1, show=args.show, wait_time=args.wait_time)
    if args.show_dir:
        hook["test_out_dir" if is_detector else "out_dir"] = args.show_dir


def enable_tta(cfg):
    """Wrap model and pipeline for test-time augmentation; a detector's default is flipping."""
    dataset = get_test_dataset(cfg)
    if cfg.get("default_scope") == "mmdet":
        tta_cfg = dict(nms=dict(type="nms", iou_threshold=0.5), max_per_img=100)
        cfg.tta_model = cfg.get("tta_model") or dict(type="DetTTAModel", tta_cfg=tta_cfg)
        cfg.tta_pipeline = cfg.get("tta_pipeline") or flip_pipeline(dataset.pipeline)
    if not (cfg.get("tta_model") and cfg.get("tta_pipeline")):
        raise InputError("--tta: the config defines no tta_model and tta_pipeline")
    cfg.model = {**cfg.tta_model, "module": cfg.model}
    dataset.pipeline = cfg.tta_pipeline


def flip_pipeline(pipeline):
    """Return a test pipeline that packs each image and its mirror image.

    The image comes first: metrics such as VOC's compare with the ground truth of the first view.
    """
    meta_keys = ["img_id", "img_path", "ori_shape", "img_shape", "scale_factor"]
    meta_keys += ["flip", "flip_direction"]
    flips = [dict(type="RandomFlip", prob=prob) for prob in (0.0, 1.0)]
    packs = [dict(type="PackDetInputs", meta_keys=meta_keys)]
    return [*copy.deepcopy(pipeline[:-1]), dict(type="TestTimeAug", transforms=[flips, packs])]


def check_out(path, checkpoint):
    """Raise InputError if the predictions cannot be written to a path, or should not be."""
    if path.suffix not in (".pkl", ".pickle"):
        raise InputError(f"--out {path}: the predictions are a pickle, name it .pkl")
    if path.resolve() == Path(checkpoint).resolve():
        raise InputError(f"--out {path} is the checkpoint: give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise InputError(f"--out {path}: {error}: give another name") from error


def main(argv=None):
    """Evaluate with the given command line; return the metrics."""
    args = parse_args(argv)
    if args.out is not None:
        check_out(Path(args.out), args.checkpoint)
    pictures = Path(args.show_dir or "")
    if pictures.is_absolute() and any(pictures.glob("*")):  # mmdet takes the images' names
        raise InputError(f"--show-dir {pictures} has files, which pictures could replace")
    cfg = cli.load_config(args)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    if args.show or args.show_dir:
        enable_visualization(cfg, args)
    if args.tta:
        enable_tta(cfg)
    if args.compile:
        training.add_hook(cfg, dict(type="CompileBackboneHook"))
    runner = training.build_runner(cfg, "test")
    if args.out is not None:
        # mmdet's metric packs masks into run lengths
        kind = "DumpDetResults" if cfg.get("default_scope") == "mmdet" else "DumpResults"
        runner.test_evaluator.metrics.append(METRICS.build(dict(type=kind, out_file_path=args.out)))
    return runner.test()


if __name__ == "__main__":
    sys.exit(cli.run(main))
