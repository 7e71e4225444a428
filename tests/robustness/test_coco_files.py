"""Annotation files with anything wrong: a clear error, or training and evaluation on every object that is not declared
lost with a count."""

import contextlib
import copy
import io
import json
import random
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.registry import DATASETS, METRICS, init_default_scope

from mrla_mm.datasets import checks, images

from ..conftest import ROOT, write_coco
from .fuzzing import fuzz, judge

NAMES = ("a", "b", "c")
CONFIG = ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py"
VALUES = [None, True, -1, 0, 1, 2, 3.5, 10**6, float("nan"), float("inf"), "1", "x", "", [], {}, [1, 2], "é"]
BOXES = [[5, 5, 0, 10], [5, 5, 10, 0.5], [-20, -20, 10, 10], [200, 5, 10, 10], [-5, -5, 200, 200], [5, 5, -10, 10]]
BOXES += [[1, 2, 3], ["1", "2", "3", "4"], [1, 2, 3, float("nan")], "1 2 3 4", {"x": 1}, [5, 5, 1, 1], [90, 60, 10, 10]]
FULL = {"size": [64, 96], "counts": [0, 64 * 96]}
MASKS = [[], None, "x", [[1, 2, 3, 4]], [[1, 2, 3]], [1, 2, 3, 4, 5, 6], [["1"] * 6], [[5, 5, 20, 5, 20, 20]], [[]]]
MASKS += [{"size": [64, 96], "counts": [10, 20, 64 * 96 - 30]}, {"size": [96, 64], "counts": [0, 64 * 96]}, FULL]
MASKS += [{"size": [64, 96]}, {"counts": "x", "size": [64, 96]}, {"size": [64, 96], "counts": [1, 2]}, {}, [[1e9] * 6]]
MASKS += [[[5, 5, 20, 5, 20, 20], [1, 2]], {"size": [64, 96], "counts": [-5, 64 * 96 + 5]}, [[float("nan")] * 6]]
FIELDS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation", "ignore"),
    "categories": ("id", "name"),
}


def change(content, rng):
    """Do one random thing to a parsed file; return its name."""
    key = rng.choice(list(FIELDS))
    entries = content.get(key) if isinstance(content.get(key), list) else []
    entry = rng.choice(entries) if entries else {}
    field = rng.choice(FIELDS[key])
    kind = rng.choice(
        ["drop field", "set field", "set field", "box", "mask", "repeat", "drop", "drop list", "set list"]
    )
    if not isinstance(entry, dict):
        return kind
    if kind == "drop field":
        entry.pop(field, None)
    elif kind == "set field":
        entry[field] = copy.deepcopy(rng.choice(VALUES))
    elif kind in ("box", "mask") and isinstance(content.get("annotations"), list) and content["annotations"]:
        target = rng.choice(content["annotations"])
        if isinstance(target, dict):
            name, choices = ("bbox", BOXES) if kind == "box" else ("segmentation", MASKS)
            target[name] = copy.deepcopy(rng.choice(choices))
    elif kind == "repeat" and entries:
        entries.append(copy.deepcopy(entry) | ({} if rng.random() < 0.5 else {"id": 99}))
    elif kind == "drop" and entries:
        entries.remove(entry)
    elif kind == "drop list":
        content.pop(key, None)
    elif kind == "set list" and rng.random() < 0.3:
        content[key] = copy.deepcopy(rng.choice(VALUES))
    return kind


def spoil(text, rng):
    """Do one random thing to the bytes of a file."""
    data = text.encode()
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            b"",
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data[:at] + b"\xff\xfe" + data[at:],
            data + data,
            b"\n" * 3 + data + b"\n",
        ]
    )


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """A small set with masks of both kinds and a crowd, and the config of a Mask R-CNN on it."""
    root = write_coco(tmp_path_factory.mktemp("fuzz"), images=3, names=NAMES)
    for split in ("train2017", "val2017"):
        path = root / f"annotations/instances_{split}.json"
        content = json.loads(path.read_text())
        content["annotations"][1].update(segmentation={"size": [64, 96], "counts": [100, 1000, 64 * 96 - 1100]})
        content["annotations"][2].update(iscrowd=1, segmentation={"size": [64, 96], "counts": [0, 64 * 96]})
        path.write_text(json.dumps(content))
    cfg = Config.fromfile(CONFIG)
    for phase, split in (("train", "train2017"), ("val", "val2017")):
        cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), metainfo=dict(classes=NAMES))
        ann_file = f"{root}/annotations/instances_{split}.json"
        cfg[f"{phase}_evaluator"] = dict(type="CocoMetric", metric=["bbox", "segm"], ann_file=ann_file)
    cfg.train_dataloader.dataset.pipeline[2].scale = cfg.val_dataloader.dataset.pipeline[1].scale = (96, 64)
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = len(NAMES)
    return root, cfg


def train_on(cfg, path):
    """Run the checks and load every object; hold the number used and declared lost against the file."""
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        checks.check_datasets(cfg, ("train",))
        init_default_scope("mmdet")
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        images.check_images_exist(dataset, "train")
        images.check_objects(dataset, "train")
        images.name_image_errors(dataset)
        used = crowd = 0
        for index in range(len(dataset)):
            loaded = dataset.pipeline(dataset.get_data_info(index))
            instances, ignored = loaded["data_samples"].gt_instances, loaded["data_samples"].ignored_instances
            assert torch.isfinite(instances.bboxes.tensor).all() and len(instances.masks) == len(instances)
            assert all(label in range(len(NAMES)) for label in instances.labels)
            used, crowd = used + len(instances), crowd + len(ignored)
    content = json.loads(path.read_bytes())
    lost = sum(int(found[1]) for w in said if (found := re.search(r": (\d+) of \d+ annotations", str(w.message))))
    crowds = sum(1 for entry in content["annotations"] if entry.get("iscrowd"))
    total = len(content["annotations"])
    assert total - crowds - lost <= used, f"{used} used of {total}, {crowds} crowds, {lost} declared lost"


def evaluate_on(cfg):
    """Run the checks, then evaluate what the file itself says is there."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        checks.check_datasets(cfg, ("val",))
        init_default_scope("mmdet")
        dataset = DATASETS.build(cfg.val_dataloader.dataset)
        images.check_images_exist(dataset, "val")
        metric = METRICS.build(cfg.val_evaluator)
        metric.dataset_meta = dataset.metainfo
        for index in range(len(dataset)):
            info = dataset.get_data_info(index)
            objects = info["instances"]
            boxes = torch.tensor([o["bbox"] for o in objects], dtype=torch.float32).reshape(-1, 4)
            found = dict(bboxes=boxes, scores=torch.ones(len(boxes)))
            found["labels"] = torch.tensor([o["bbox_label"] for o in objects], dtype=torch.long)
            masks = torch.zeros(len(boxes), 64, 96, dtype=torch.bool)
            sample = dict(img_id=info["img_id"], ori_shape=(64, 96), pred_instances=found | dict(masks=masks))
            metric.process({}, [sample])
        metric.evaluate(len(dataset))


@pytest.mark.parametrize("phase", ["train", "val"])
def test_annotation_file(coco, phase):
    root, cfg = coco
    path = root / f"annotations/instances_{phase}2017.json"
    whole = path.read_text()
    action = (lambda: train_on(cfg, path)) if phase == "train" else (lambda: evaluate_on(cfg))

    @fuzz(40)
    @given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([False] * 7 + [True]))
    def check(seed, changes, bytes_too):
        rng, content = random.Random(seed), json.loads(whole)
        done = [change(content, rng) for _ in range(changes)]
        text = json.dumps(content)
        path.write_bytes(spoil(text, rng) if bytes_too else text.encode())
        error = judge(f"COCO file: {phase}", action, named=[str(path), root.name])
        assert done or bytes_too or error is None

    try:
        check()
    finally:
        path.write_text(whole)
