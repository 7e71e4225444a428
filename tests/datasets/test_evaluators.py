"""Evaluators are checked before a run, not by pycocotools after its first epoch."""

import json

import pytest
from mmdet.evaluation import CocoMetric

from mrla_mm.datasets import checks

from .conftest import VAL, edit, message


def test_missing_evaluator_file(coco_root, make_config):
    """The evaluator's own path is checked too: it is not moved with the data set's."""
    cfg = make_config(coco_root)
    cfg.val_evaluator = [dict(type="CocoMetric", ann_file="elsewhere/val.json")]
    said = message(cfg)
    assert "val_evaluator: annotation file elsewhere/val.json does not exist" in said
    assert said.endswith(f"set val_evaluator.ann_file to the file of val_dataloader, {coco_root}/{VAL}")


@pytest.mark.parametrize("kind", ["CocoMetric", "mmdet.CocoMetric", CocoMetric])
def test_the_evaluator_needs_iscrowd(make_coco, make_config, kind):
    """pycocotools looks it up in every annotation, after the first epoch; training needs none."""
    root = make_coco(images=2)
    edit(root, lambda content: [a.pop("iscrowd") for a in content["annotations"]])
    cfg = make_config(root)
    cfg.pop("train_evaluator")
    checks.check_datasets(cfg, ("train", "val"))
    edit(root, lambda content: content["annotations"][0].pop("iscrowd"), VAL)
    cfg.val_evaluator.type = kind
    said = message(cfg)
    assert VAL in said and "annotations[0] has no iscrowd" in said and '"iscrowd": 0' in said
    cfg.val_evaluator.format_only = True
    checks.check_datasets(cfg, ("train", "val"))


def test_the_evaluator_belongs_to_the_data(make_coco, make_config, tmp_path):
    """Setting the data set and forgetting the evaluator would end the run after its first epoch."""
    root = make_coco(images=2)
    cfg = make_config(root)
    cfg.val_evaluator.ann_file = str(tmp_path / "other.json")
    content = json.loads((root / VAL).read_text())
    (tmp_path / "other.json").write_text(json.dumps(content))
    checks.check_datasets(cfg, ("train", "val"))
    content["images"] = content["images"][:1]
    (tmp_path / "other.json").write_text(json.dumps(content))
    said = message(cfg)
    assert f"val_evaluator.ann_file={tmp_path}/other.json lacks images" in said and str(root / VAL) in said


def test_nothing_to_evaluate_against_warns(make_coco, make_config):
    """Without annotations pycocotools reports -1 for everything."""
    root = make_coco(images=1)
    edit(root, lambda content: content.update(annotations=[]), VAL)
    with pytest.warns(UserWarning, match="every AP of val will be -1"):
        checks.check_datasets(make_config(root), ("train", "val"))
