"""Trained models and images, as the tools name them on the command line."""

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.device import get_device
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mrla_mm.config import add_option_argument, device_name, read_config
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")


class Trained(NamedTuple):
    """A model in eval mode, its config, and the metadata of its checkpoint."""

    model: nn.Module
    cfg: Config
    meta: Mapping


class Prepared(NamedTuple):
    """An image as a model takes it.

    Attributes:
        inputs: (1, 3, height, width), normalised and padded.
        samples: the data sample, in a list, or None where the pipeline packs none.
        picture: (H, W, 3) uint8, RGB: what the model sees, without padding.
    """

    inputs: Tensor
    samples: list | None
    picture: np.ndarray


class LoadedModel(NamedTuple):
    """A model in eval mode, the names of its classes if known, and the pipeline that prepares its images."""

    name: str
    model: nn.Module
    classes: tuple[str, ...]
    pipeline: Compose

    def prepare(self, path: str | Path) -> Prepared:
        """Read an image file as the test pipeline does."""
        packed = self.pipeline(dict(img_path=str(path), img_id=0))
        height, width = packed["inputs"].shape[-2:]
        data = self.model.data_preprocessor(pseudo_collate([packed]), False)
        picture = packed["inputs"].numpy().transpose(1, 2, 0).astype(np.uint8)
        picture = np.ascontiguousarray(picture[..., ::-1])  # pipelines read BGR
        return Prepared(data["inputs"], data.get("data_samples"), picture[:height, :width])


def load_model(
    config: str,
    checkpoint: str | Path,
    *,
    device: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Trained:
    """Return a config's model with all the weights of a checkpoint, ready to evaluate.

    Args:
        config: config file, or `package::name` of a packed one.
        checkpoint: checkpoint file; its keys must be the model's.
        device: "cpu", "cuda", ...; by default a GPU where there is one.
        options: overrides of config values by dotted name.

    Raises:
        InputError: there is no such config, or the file is not a checkpoint or that of another
            model.
    """
    cfg = read_config(config, options or {})
    model = build_model(cfg)
    report = load_weights(model, checkpoint)
    return Trained(model.to(device or get_device()).eval(), cfg, report.meta)


def build_model(cfg: Config) -> nn.Module:
    """Return the model of a config as it starts, without weights from files."""
    init_default_scope(cfg.get("default_scope") or "mmengine")
    model = copy.deepcopy(cfg.model)
    if cfg.get(
        "data_preprocessor"
    ):  # mmpretrain's configs have it beside the model, where mmengine's Runner looks
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    return MODELS.build(model)


def get_test_dataset(cfg: Config) -> dict:
    """Return the config of the test data set, the first of several, without what wraps it; empty for none."""
    dataset = (cfg.get("test_dataloader") or {}).get("dataset") or {}
    while "dataset" in dataset or dataset.get("datasets"):
        dataset = dataset["dataset"] if "dataset" in dataset else dataset["datasets"][0]
    return dataset


def get_test_pipeline(cfg: Config) -> Compose:
    """Return the config's test pipeline without what loads annotations.

    Raises:
        InputError: the config has none.
    """
    steps = get_test_dataset(cfg).get("pipeline")
    if not steps:
        raise InputError(
            "the config has no test_dataloader.dataset.pipeline to prepare the images with"
        )
    return Compose([step for step in steps if "LoadAnnotations" not in str(step["type"])])


def add_picture_arguments(parser: argparse.ArgumentParser, *, out_dir: str) -> None:
    """Add what every tool that runs a model over images and draws something takes."""
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument("input", help="image file, or folder of images")
    parser.add_argument(
        "--out-dir", type=Path, default=Path(out_dir), help=f"folder for the results ({out_dir})"
    )
    parser.add_argument("--max-images", type=int, help="take at most so many images of a folder")
    parser.add_argument(
        "--device",
        type=device_name,
        help="cpu, cuda, cuda:1, ... (default: cuda where there is one)",
    )
    add_option_argument(parser)


def add_compare_argument(parser: argparse.ArgumentParser) -> None:
    """Add --compare, which names further models to draw beside the first."""
    repeated = dict(nargs=2, action="append", default=[], metavar=("CONFIG", "CHECKPOINT"))
    told = "draw another model beside it; may be given several times (--cfg-options concern the first model alone)"
    parser.add_argument("--compare", **repeated, help=told)


def chosen_images(args: argparse.Namespace) -> list[Path]:
    """Return the image that the arguments name, or those of the folder by name, and make the folder for the results.

    Raises:
        InputError: there is no image, or the results would lie among the images and could replace
            them.
    """
    source = Path(args.input)
    found = sorted(path for path in source.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    images = [source] if source.is_file() else found[: args.max_images]
    if not images:
        raise InputError(
            f"input {source} is neither an image nor a folder with images ({', '.join(IMAGE_SUFFIXES)})"
        )
    if args.out_dir.resolve() == images[0].parent.resolve():
        raise InputError(
            f"--out-dir {args.out_dir} holds the input, which results could replace: give another folder"
        )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    return images


def load_models(args: argparse.Namespace) -> list[LoadedModel]:
    """Return the model of the arguments and those of --compare, each named by its config and checkpoint.

    Raises:
        InputError: see `load_model`; or a config has no test pipeline.
    """
    given = [(args.config, args.checkpoint, args.cfg_options)]
    given += [(config, checkpoint, None) for config, checkpoint in getattr(args, "compare", ())]
    loaded = []
    for config, checkpoint, options in given:
        model, cfg, meta = load_model(config, checkpoint, device=args.device, options=options)
        facts = meta.get("dataset_meta") or get_test_dataset(cfg).get("metainfo") or {}
        classes = tuple(facts.get("classes") or facts.get("CLASSES") or ())
        name = f"{Path(cfg.filename).stem}, {Path(checkpoint).stem}"
        loaded.append(LoadedModel(name, model, classes, get_test_pipeline(cfg)))
    return loaded
