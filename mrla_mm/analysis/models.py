"""A model of a config with the weights of a checkpoint, and images as the config's test pipeline prepares them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from torch import Tensor, nn

from mrla_mm.config import read_file
from mrla_mm.errors import InputError


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
    """A model in eval mode and the pipeline that prepares its images."""

    name: str
    model: nn.Module
    pipeline: Compose
    scope: str

    @property
    def is_detector(self) -> bool:
        """Whether the config is mmdet's."""
        return self.scope == "mmdet"

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names that the checkpoint or the data set of the config states, or none."""
        return tuple((getattr(self.model, "dataset_meta", None) or {}).get("classes", ()))

    def prepare(self, path: str | Path) -> Prepared:
        """Read an image file as the test pipeline does."""
        packed = self.pipeline(dict(img_path=str(path), img_id=0))
        height, width = packed["inputs"].shape[-2:]
        data = self.model.data_preprocessor(pseudo_collate([packed]), False)
        picture = packed["inputs"].numpy().transpose(1, 2, 0).astype(np.uint8)
        picture = np.ascontiguousarray(picture[..., ::-1])  # pipelines read BGR
        return Prepared(data["inputs"], data.get("data_samples"), picture[:height, :width])


def load_model(config: str | Path, checkpoint: str | Path, *, device: str | None = None, options=None) -> LoadedModel:
    """Return a config's model with the weights of a checkpoint, ready to evaluate.

    Args:
        config: config file.
        checkpoint: checkpoint file; its keys must be the model's.
        device: "cpu", "cuda", ...; by default a GPU where there is one.
        options: overrides of config values by dotted name.

    Raises:
        InputError: the config cannot be read, or has no model or no test pipeline; the checkpoint is missing or does
            not fit the model; or the device cannot be used.
    """
    cfg = read_file(config)
    cfg.merge_from_dict(dict(options or {}))
    if "model" not in cfg:
        raise InputError(f"config {config} has no model")
    scope = cfg.get("default_scope", "mmengine")
    init_default_scope(scope)
    if not Path(checkpoint).is_file():
        raise InputError(f"checkpoint {checkpoint} does not exist: give a .pth file that tools/train.py wrote")
    pipeline = test_pipeline(cfg)
    model = MODELS.build(cfg.model)
    try:
        loaded = load_checkpoint(model, str(checkpoint), map_location="cpu", strict=True)
    except RuntimeError as error:
        raise InputError(f"checkpoint {checkpoint} does not fit the config's model: {error}") from error
    meta = (loaded.get("meta") or {}).get("dataset_meta") or test_dataset(cfg).get("metainfo") or {}
    model.dataset_meta = {str(key).lower(): value for key, value in meta.items()}
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    return LoadedModel(Path(config).stem, model.eval(), pipeline, scope)


def test_dataset(cfg: Config) -> dict:
    """Return the config of the test data set, without what wraps it; empty where there is none."""
    dataset = (cfg.get("test_dataloader") or {}).get("dataset")
    while dataset is not None and "dataset" in dataset:
        dataset = dataset["dataset"]
    return dataset or {}


def test_pipeline(cfg: Config) -> Compose:
    """Return the config's test pipeline without what loads annotations.

    Raises:
        InputError: the config has none.
    """
    steps = test_dataset(cfg).get("pipeline")
    if not steps:
        raise InputError("the config has no test_dataloader.dataset.pipeline to prepare the images with")
    return Compose([step for step in steps if "LoadAnnotations" not in step["type"]])
