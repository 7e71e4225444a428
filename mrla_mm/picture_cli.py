"""What the tools share that run models over images and draw what they see: arguments, images, models."""

import argparse
from collections import Counter
from pathlib import Path

import cv2

from mrla_mm import cli
from mrla_mm.analysis.models import LoadedModel, test_dataset, test_pipeline
from mrla_mm.datasets.images import fault_of
from mrla_mm.errors import InputError
from mrla_mm.trained import load_model


def add_picture_arguments(parser: argparse.ArgumentParser, *, out_dir: str) -> None:
    """Add what every tool that runs a model over images and draws something takes."""
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument("input", help="image file, or folder of images")
    parser.add_argument("--out-dir", type=Path, default=Path(out_dir), help=f"folder for the results ({out_dir})")
    parser.add_argument("--max-images", type=int, help="take at most so many images of a folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )


def add_compare_argument(parser: argparse.ArgumentParser) -> None:
    """Add --compare, which names further models to draw beside the first."""
    parser.add_argument(
        "--compare",
        nargs=2,
        action="append",
        default=[],
        metavar=("CONFIG", "CHECKPOINT"),
        help="draw another model beside it; may be given several times (--cfg-options concern the first model alone)",
    )


def chosen_images(args: argparse.Namespace) -> list[Path]:
    """Return the images that the arguments of `add_picture_arguments` choose.

    Raises:
        InputError: there is none, their number is not positive, or one of them is broken or no image.
    """
    if args.max_images is not None and args.max_images < 1:
        raise InputError(f"--max-images {args.max_images}: give a positive number")
    images = cli.find_images(args.input)[: args.max_images]
    for path in images:
        fault = fault_of(str(path)) or (None if cv2.haveImageReader(str(path)) else "no image that OpenCV reads")
        if fault:
            raise InputError(f"image {path} cannot be read ({fault}); replace it, or take it out of the folder")
    return images


def load_models(args: argparse.Namespace) -> list[LoadedModel]:
    """Return the model of the arguments and those of --compare; models of one config are told apart by checkpoint.

    Raises:
        InputError: a config or checkpoint is missing, or they do not fit.
    """
    given = [(args.config, args.checkpoint, args.cfg_options)]
    given += [(config, checkpoint, None) for config, checkpoint in getattr(args, "compare", ())]
    models = [load(config, checkpoint, device=args.device, options=options) for config, checkpoint, options in given]
    names = Counter(loaded.name for loaded in models)
    return [
        loaded if names[loaded.name] == 1 else loaded._replace(name=f"{loaded.name}, {Path(checkpoint).stem}")
        for loaded, (_, checkpoint, _) in zip(models, given, strict=True)
    ]


def load(config: str, checkpoint: str, *, device: str | None, options: dict | None) -> LoadedModel:
    """Return a trained model with its test pipeline; see `mrla_mm.trained.load_model` for the arguments.

    Raises:
        InputError: also where the model has no backbone to look into, or the config no test pipeline.
    """
    model, cfg, meta = load_model(config, checkpoint, device=device, options=options)
    if not hasattr(model, "backbone") or not hasattr(model, "extract_feat"):
        raise InputError(
            f"the {type(model).__name__} of {config} has no backbone to look into: give a detector's or a "
            "classifier's config"
        )
    facts = meta.get("dataset_meta") or test_dataset(cfg).get("metainfo") or {}
    model.dataset_meta = {str(key).lower(): value for key, value in facts.items()}
    return LoadedModel(Path(cfg.filename).stem, model, test_pipeline(cfg), cfg.get("default_scope", "mmengine"))


def paths_by_name(images: list[Path], out_dir: Path) -> dict[Path, Path]:
    """Return the picture to write for each image: <image name>.png, with its suffix where two share a name."""
    stems = Counter(path.stem for path in images)
    return {path: out_dir / f"{path.stem if stems[path.stem] == 1 else path.name}.png" for path in images}
