#!/usr/bin/env python
"""Draw what in an image supports a prediction: Grad-CAM and ScoreCAM of layers of the backbone.

  visualize_cam.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--class NAME] [--compare CONFIG2
  CHECKPOINT2]...

Explains a classifier's likeliest class or a detector's best detection, of the class that --class
names if given. Models of --compare are asked for the same class and box. Writes <image name>.png.
"""

import argparse
import sys

from mrla_mm import cli, inference
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_cam.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inference.add_picture_arguments(parser, out_dir="work_dirs/cam")
    inference.add_compare_argument(parser)
    parser.add_argument(
        "--class", dest="class_name", metavar="NAME", help="name of a class, or its number from 0"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["layer3", "layer4"],
        metavar="NAME",
        help="of the backbone (default: %(default)s)",
    )
    parser.add_argument(
        "--max-channels",
        type=int,
        metavar="N",
        help="ScoreCAM runs the model once a channel: only the N most varied",
    )
    return parser.parse_args(argv)


def class_label(name, classes):
    """Return the number of a class given by name or number, None for none."""
    if name is None or name in classes:
        return classes.index(name) if name else None
    if name.isdecimal():
        return int(name)
    raise InputError(
        f"--class {name}: the model has no such class; it has {', '.join(classes[:8])} ..."
    )


def scaled(target, seen, picture):
    """Return a target whose box lies in another size of the picture than it was seen in."""
    if target.box is None:
        return target
    height, width = (
        ours / theirs for ours, theirs in zip(picture.shape[:2], seen.shape[:2], strict=True)
    )
    return target._replace(box=target.box * target.box.new_tensor([width, height, width, height]))


def maps_of(loaded, prepared, target, args):
    """Yield the title and map of each method and layer."""
    from mrla_mm.analysis import cams

    sample = prepared.samples[0] if prepared.samples else None
    for layer in args.layers:
        module = loaded.model.backbone.get_submodule(layer)
        options = loaded.model, module, prepared.inputs, target, sample
        yield f"Grad-CAM {layer}", cams.grad_cam(*options)
        yield f"ScoreCAM {layer}", cams.score_cam(*options, max_channels=args.max_channels)


def draw(row, loaded, prepared, target, args):
    """Draw what a model saw with the box that is explained, and its maps, warm where they support the prediction."""
    name = loaded.classes[target.label] if loaded.classes else f"class {target.label}"
    row[0].imshow(prepared.picture)
    row[0].set_title(f"{loaded.name}: {name}", fontsize=7)
    if target.box is not None:
        left, top, right, bottom = target.box.tolist()
        row[0].plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="red")
    padded_height, padded_width = prepared.inputs.shape[2:]
    height, width = prepared.picture.shape[:2]
    for axes, (title, cam) in zip(row[1:], maps_of(loaded, prepared, target, args), strict=True):
        axes.imshow(prepared.picture.mean(-1), cmap="gray")
        extent = (0, padded_width, padded_height, 0)
        axes.imshow(
            cam.cpu(),
            cmap="turbo",
            alpha=0.5,
            extent=extent,
            interpolation="bilinear",
            vmin=0,
            vmax=1,
        )
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_title(title, fontsize=7)


def main(argv=None):
    """Explain the models' predictions in the images."""
    args = parse_args(argv)
    from matplotlib.figure import Figure

    from mrla_mm.analysis import cams

    images = inference.chosen_images(args)
    models = inference.load_models(args)
    label = class_label(args.class_name, models[0].classes)
    for loaded in models:
        if missing := set(args.layers) - {
            name for name, _ in loaded.model.backbone.named_modules()
        }:
            raise InputError(
                f"--layers: the backbone of {loaded.name} has no {missing.pop()}; give a stage of it"
            )
    for path in images:
        ready = [loaded.prepare(path) for loaded in models]
        sample = ready[0].samples[0] if ready[0].samples else None
        target = cams.choose_target(models[0].model, ready[0].inputs, sample, label)
        if target is None:
            print(f"{path.name}: nothing detected, nothing to explain", flush=True)
            continue
        columns = 1 + 2 * len(args.layers)
        figure = Figure(figsize=(2.2 * columns, 2.5 * len(models)), layout="compressed")
        grid = figure.subplots(len(models), columns, squeeze=False)
        for row, loaded, prepared in zip(grid, models, ready, strict=True):
            for axes in row:
                axes.set_axis_off()
            draw(row, loaded, prepared, scaled(target, ready[0].picture, prepared.picture), args)
        figure.savefig(args.out_dir / f"{path.stem}.png", dpi=130)
        print(args.out_dir / f"{path.stem}.png", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
