"""Shared by the tests of the data set check: a run on a set as far as the hook sees it, and ways to break the set."""

import copy
import json
import logging
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from torch import nn

from mrla_mm.datasets import DatasetCheckHook

from ..conftest import ROOT

TRAIN, VAL = (f"annotations/instances_{split}.json" for split in ("train2017", "val2017"))


def edit(root, change, name=TRAIN):
    """Change the content of an annotation file."""
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


class Head(nn.Module):
    """A head of a number of classes."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes


@pytest.fixture(scope="module")
def make_config():
    """Return `make(root, **metainfo)`: the Mask R-CNN config on the set at `root`."""
    original = Config.fromfile(ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py")

    def make(root, **metainfo):
        cfg = copy.deepcopy(original)
        for phase in ("train", "val"):
            cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), metainfo=metainfo)
        return cfg

    return make


@pytest.fixture
def check(caplog):
    """Return `check(cfg, num_classes)`: build the data sets, run the hook, and return what it logged."""
    logger = logging.getLogger("test")
    caplog.set_level(logging.INFO, "test")

    def run(cfg, num_classes=80, scope="mmdet"):
        init_default_scope(scope)
        heads = dict(rpn_head=Head(1), roi_head=nn.ModuleDict(dict(bbox_head=Head(num_classes))))
        loops = {}
        for phase in ("train", "val"):
            dataset = DATASETS.build(cfg[f"{phase}_dataloader"].dataset)
            loops[f"_{phase}_loop"] = SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
        runner = SimpleNamespace(model=nn.ModuleDict(heads), logger=logger, _test_loop=None, **loops)
        DatasetCheckHook().before_run(runner)
        return caplog.text

    return run
