#!/usr/bin/env python
"""Draw what in an image speaks for a prediction: Grad-CAM and ScoreCAM of a backbone's last two stages.

  visualize_cam.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--class NAME] [--compare CONFIG2 CHECKPOINT2]...

Explains a classifier's logit of a class, the likeliest one unless --class names another; or a detector's score of its
best detection (of that class), as log-odds: in a changed image, that of the best detection of the class that overlaps
it by half.
Models of --compare are asked for the same class and box. Writes <image name>.png. Needs `pip install 'mrla_mm[cam]'`.
"""

import argparse
import sys

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from mrla_mm import cli, outputs, picture_cli
from mrla_mm.analysis import cams
from mrla_mm.analysis.cam_plots import Explanation, plot_explanations
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_cam.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    picture_cli.add_picture_arguments(parser, out_dir="work_dirs/cam")
    picture_cli.add_compare_argument(parser)
    parser.add_argument("--class", dest="class_name", metavar="NAME", help="name of a class, or its number from 0")
    parser.add_argument("--methods", nargs="+", choices=list(cams.METHODS), default=list(cams.METHODS))
    parser.add_argument("--layers", nargs="+", metavar="NAME", help="parts of the backbone (default: last two stages)")
    parser.add_argument(
        "--max-channels", type=int, metavar="N", help="ScoreCAM runs the model once a channel: take only the N busiest"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="images at a time for ScoreCAM (default: 16)")
    args = parser.parse_args(argv)
    for name in ("max_channels", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: give a positive number")
    return args


def class_label(given, models):
    """Return the number of a class given by name or number, None for none.

    Raises:
        InputError: the models do not have it, or have other classes each.
    """
    classes = models[0].classes
    for other in models[1:]:
        if classes and other.classes and other.classes != classes:
            raise InputError(f"{models[0].name} and {other.name} have other classes each: no class is in both")
    if given is None:
        return None
    if given in classes:
        return classes.index(given)
    if given.isdecimal() and (not classes or int(given) < len(classes)):
        return int(given)
    some = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "") if classes else "not named: give a number"
    raise InputError(f"--class {given}: the model has no such class; they are {some}")


def explain(loaded, path, args, target, seen):
    """Return what a model says about the target, whose box lies in a picture of the size `seen`, and why."""
    prepared = loaded.prepare(path)
    layers = args.layers or cams.stage_ends(loaded.model, prepared.inputs)[-2:]
    cams.check_layers(loaded.model, layers)
    if target.box is not None:
        height, width = (ours / theirs for ours, theirs in zip(prepared.picture.shape[:2], seen, strict=True))
        target = target._replace(box=target.box * target.box.new_tensor([width, height, width, height]))
    options = dict(methods=args.methods, max_channels=args.max_channels, batch_size=args.batch_size)
    score, maps = cams.explain(loaded, prepared, target, layers=layers, **options)
    name = loaded.classes[target.label] if loaded.classes else f"class {target.label}"
    return Explanation(loaded.name, prepared.picture, prepared.inputs.shape[2:], target, name, score, maps)


def main(argv=None):
    """Explain the models' predictions in the images."""
    args = parse_args(argv)
    cams.import_torchcam()
    images = picture_cli.chosen_images(args)
    out_files = picture_cli.paths_by_name(images, args.out_dir)
    outputs.spare_inputs(images, out_files.values())
    outputs.make_folder(args.out_dir)
    models = picture_cli.load_models(args)
    label = class_label(args.class_name, models)
    for number, (path, out_file) in enumerate(out_files.items(), 1):
        prepared = models[0].prepare(path)
        target = cams.choose_target(models[0], prepared, label)
        if target is None:
            print(f"[{number}/{len(images)}] {path.name}: nothing detected, nothing to explain", flush=True)
            continue
        seen = prepared.picture.shape[:2]
        plot_explanations([explain(loaded, path, args, target, seen) for loaded in models], out_file)
        print(f"[{number}/{len(images)}] {out_file}", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
