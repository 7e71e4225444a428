"""Shared by the tests of the data set checks: a config on a set, and ways to break the set and to read what is said."""

import copy
import json

import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from mrla_mm.datasets import checks
from mrla_mm.errors import InputError

from ..conftest import ROOT

CONFIG = ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py"
TRAIN, VAL = (f"annotations/instances_{split}.json" for split in ("train2017", "val2017"))


@pytest.fixture(scope="module")
def make_config():
    """Return `make(root, **metainfo)`: the Mask R-CNN config on the set at `root`."""
    original = Config.fromfile(CONFIG)

    def make(root, **metainfo):
        cfg = copy.deepcopy(original)
        for phase, split in (("train", "train2017"), ("val", "val2017")):
            cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), metainfo=metainfo)
            cfg[f"{phase}_evaluator"] = dict(type="CocoMetric", ann_file=f"{root}/annotations/instances_{split}.json")
        return cfg

    return make


def message(cfg, phases=("train", "val")):
    with pytest.raises(InputError) as caught:
        checks.check_datasets(cfg, phases)
    return str(caught.value)


def edit(root, change, name=TRAIN):
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def built(cfg, phase="train"):
    init_default_scope("mmdet")
    return DATASETS.build(cfg[f"{phase}_dataloader"].dataset)
