"""Models from configs, with trained weights, and images as their test pipelines prepare them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.device import get_device
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mrla_mm.config import read_config
from mrla_mm.weights import load_weights


class PreparedImage(NamedTuple):
    """An image as a model takes it."""

    inputs: Tensor  # (1, 3, height, width), normalised and padded
    sample: BaseDataElement | None  # None where the pipeline packs none
    picture: np.ndarray  # (H, W, 3) uint8, RGB: what the model sees, without padding


class LoadedModel(NamedTuple):
    """A trained model in eval mode, its config, and the names of its classes if known."""

    name: str
    model: nn.Module
    cfg: Config
    classes: tuple[str, ...]

    def prepare(self, path: str | Path) -> PreparedImage:
        """Read an image file as the config's test pipeline does."""
        steps = get_test_dataset(self.cfg)["pipeline"]
        pipeline = Compose([step for step in steps if "LoadAnnotations" not in str(step["type"])])
        packed = pipeline(dict(img_path=str(path), img_id=0))
        data = self.model.data_preprocessor(pseudo_collate([packed]), False)
        picture = packed["inputs"].numpy().transpose(1, 2, 0).astype(np.uint8)
        picture = np.ascontiguousarray(picture[..., ::-1])  # pipelines read BGR
        (sample,) = data.get("data_samples") or [None]
        return PreparedImage(data["inputs"], sample, picture)


def load_model(
    config: str,
    checkpoint: str | Path,
    *,
    device: str | None = None,
    options: Mapping[str, object] | None = None,
) -> LoadedModel:
    """Return a config's model with all the weights of a checkpoint, by default on a GPU if any.

    Classes are those of the checkpoint, or of the test data set. Raises InputError if the
    file is not a checkpoint of its model.
    """
    cfg = read_config(config, options or {})
    model = build_model(cfg)
    classes = class_names(load_weights(model, checkpoint).meta, cfg)
    name = f"{Path(cfg.filename).stem}, {Path(checkpoint).stem}"
    return LoadedModel(name, model.to(device or get_device()).eval(), cfg, classes)


def class_names(meta: Mapping, cfg: Config) -> tuple[str, ...]:
    """Return the classes that a checkpoint's `meta` names, or the config's test data set."""
    named = meta if "CLASSES" in meta else get_test_dataset(cfg).get("metainfo")  # by mmdet 2
    facts = meta.get("dataset_meta") or named or {}
    return tuple(facts.get("classes") or facts.get("CLASSES") or ())


def build_model(cfg: Config) -> nn.Module:
    """Return the model of a config as it starts, without weights from files."""
    init_default_scope(cfg.get("default_scope") or "mmdet")
    model = copy.deepcopy(cfg.model)
    if cfg.get("data_preprocessor"):  # where mmpretrain's configs have it
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    return MODELS.build(model)


def get_test_dataset(cfg: Config) -> dict:
    """Return the config of the first test data set without what wraps it; empty for none."""
    dataset = (cfg.get("test_dataloader") or {}).get("dataset") or {}
    while "dataset" in dataset or dataset.get("datasets"):
        dataset = dataset["dataset"] if "dataset" in dataset else dataset["datasets"][0]
    return dataset
