"""A trained model, and images as its config's test pipeline prepares them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from torch import Tensor, nn

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
        """Read an image file as the test pipeline does.

        Raises:
            InputError: the pipeline cannot read or resize it, or makes something else of it than one image.
        """
        try:
            packed = self.pipeline(dict(img_path=str(path), img_id=0))
            height, width = packed["inputs"].shape[-2:]
        except Exception as error:  # loaders and transforms raise anything
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"image {path} cannot be prepared by the config's test pipeline: {type(error).__name__}: {reason}"
            ) from error
        data = self.model.data_preprocessor(pseudo_collate([packed]), False)
        picture = packed["inputs"].numpy().transpose(1, 2, 0).astype(np.uint8)
        picture = np.ascontiguousarray(picture[..., ::-1])  # pipelines read BGR
        return Prepared(data["inputs"], data.get("data_samples"), picture[:height, :width])


def test_dataset(cfg: Config) -> dict:
    """Return the config of the test data set, the first of several, without what wraps it; empty for none."""
    dataset = (cfg.get("test_dataloader") or {}).get("dataset") or {}
    while "dataset" in dataset or dataset.get("datasets"):
        dataset = dataset["dataset"] if "dataset" in dataset else dataset["datasets"][0]
    return dataset


def test_pipeline(cfg: Config) -> Compose:
    """Return the config's test pipeline without what loads annotations.

    Raises:
        InputError: the config has none, or one that cannot be built.
    """
    steps = test_dataset(cfg).get("pipeline")
    if not steps:
        raise InputError("the config has no test_dataloader.dataset.pipeline to prepare the images with")
    try:
        return Compose([step for step in steps if "LoadAnnotations" not in str(step["type"])])
    except Exception as error:  # a value of the config can make a constructor raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"the config's test_dataloader.dataset.pipeline cannot be built: {reason}") from error
