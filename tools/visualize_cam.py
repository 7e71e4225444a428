#!/usr/bin/env python
"""Draw what in an image supports a prediction: Grad-CAM and ScoreCAM of layers of the backbone.

  visualize_cam.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--compare CONFIG2 CHECKPOINT2]...

Explains a classifier's likeliest class or a detector's best detection, of the class that --class
names if given. Models of --compare are asked for the same class and box. Writes <image name>.png.
"""

import sys
import textwrap

import numpy as np
from matplotlib.figure import Figure

from mrla_mm import cli
from mrla_mm.analysis import cams
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = cli.picture_parser("visualize_cam", __doc__, compare=True)
    parser.add_argument("--class", dest="class_name", metavar="NAME", help="or its number from 0")
    layers = dict(nargs="+", default=["layer3", "layer4"], metavar="NAME")
    parser.add_argument("--layers", **layers, help="of the backbone (default: %(default)s)")
    channels = "ScoreCAM runs the model once a channel: only the N that vary most"
    parser.add_argument("--max-channels", type=int, metavar="N", help=channels)
    return parser.parse_args(argv)


def class_label(name, classes):
    """Return the number of a class given by name or number, None for none."""
    if name is None:
        return None
    if name in classes:
        return classes.index(name)
    if name.isdecimal() and (not classes or int(name) < len(classes)):
        return int(name)
    known = ", ".join(classes[:8])
    raise InputError(f"--class {name}: the model has no such class; it has {known} ...")


def renumbered(target, first, other):
    """Return a first model's target for another, which may have its classes in another order."""
    if not (first.classes and other.classes) or first.classes == other.classes:
        return target
    name = first.classes[target.label]
    if name not in other.classes:
        raise InputError(f"{other.name} has no class {name!r}: give --class one that all have")
    return target._replace(label=other.classes.index(name))


def scaled(target, seen, sample):
    """Return a target whose box lies in another sample of the image than it was seen in."""
    if target.box is None:
        return target
    factors = np.divide(*(each.get("scale_factor", (1, 1)) for each in (sample, seen)))
    return target._replace(box=target.box * target.box.new_tensor([*factors, *factors]))


def draw(row, loaded, prepared, target, args):
    """Draw what a model saw with the box to explain, and its maps; return the last map drawn."""
    picture = prepared.picture
    inputs = prepared.inputs
    for axes in row:
        axes.set_axis_off()
        axes.set(xlim=(0, picture.shape[1]), ylim=(picture.shape[0], 0))
    name = loaded.classes[target.label] if loaded.classes else f"class {target.label}"
    row[0].imshow(picture)
    row[0].set_title(textwrap.fill(f"{loaded.name}: {name}", 32), fontsize=9)
    if target.box is not None:
        left, top, right, bottom = target.box.tolist()
        row[0].plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="red")
    panels = iter(row[1:])
    for layer in args.layers:
        module = loaded.model.backbone.get_submodule(layer)
        given = loaded.model, module, inputs, target, prepared.sample
        maps = {"Grad-CAM": cams.grad_cam(*given)}
        maps["ScoreCAM"] = cams.score_cam(*given, max_channels=args.max_channels)
        for method, cam in maps.items():
            axes = next(panels)
            axes.imshow(picture.mean(-1), cmap="gray")
            colours = dict(cmap="turbo", vmin=0, vmax=1, alpha=0.5, interpolation="bilinear")
            extent = 0, inputs.shape[3], inputs.shape[2], 0
            shown = axes.imshow(cam.cpu(), extent=extent, **colours)
            axes.set_title(f"{method} {layer}", fontsize=9)
    return shown


def main(argv=None):
    """Explain the models' predictions in the images."""
    args = parse_args(argv)
    images = cli.chosen_images(args)
    stems = [path.stem for path in images]
    models = cli.load_models(args)
    label = class_label(args.class_name, models[0].classes)
    for loaded in models:
        known = dict(loaded.model.backbone.named_modules())
        if missing := [layer for layer in args.layers if layer not in known]:
            raise InputError(f"--layers: the backbone of {loaded.name} has no {missing[0]}")
    for path in images:
        prepared = [loaded.prepare(path) for loaded in models]
        first = prepared[0]
        target = cams.choose_target(models[0].model, first.inputs, first.sample, label)
        if target is None:
            print(f"{path.name}: nothing detected, nothing to explain", flush=True)
            continue
        columns = 1 + 2 * len(args.layers)
        figure = Figure(figsize=(2.7 * columns, 2.7 * len(models)), layout="compressed")
        rows = figure.subplots(len(models), columns, squeeze=False)
        for row, loaded, image in zip(rows, models, prepared, strict=True):
            asked = scaled(target, first.sample, image.sample)
            asked = renumbered(asked, models[0], loaded)
            scale = draw(row, loaded, image, asked, args)
        figure.colorbar(scale, ax=rows, shrink=0.8, label="support (1: most)")
        name = path.name if stems.count(path.stem) > 1 else path.stem
        out_file = args.out_dir / f"{name}.{args.format}"
        figure.savefig(out_file, dpi=130, bbox_inches="tight")
        print(out_file, flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
