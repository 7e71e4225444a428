"""Test-time augmentation of a detector."""

import cv2
import numpy as np
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from tests.conftest import load_tool

ANNOTATION = """<annotation>
<size><width>40</width><height>20</height></size>
<object><name>cell</name><difficult>0</difficult>
<bndbox><xmin>2</xmin><ymin>4</ymin><xmax>10</xmax><ymax>12</ymax></bndbox></object>
</annotation>"""


def test_the_first_view_has_the_ground_truth_of_the_file(tmp_path):
    """VOCMetric compares with the boxes that the pipeline read, of the first view."""
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations/one.xml").write_text(ANNOTATION)
    (tmp_path / "names.txt").write_text("one")
    cv2.imwrite(str(tmp_path / "one.jpg"), np.zeros((20, 40, 3), np.uint8))
    pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", with_bbox=True)]
    pipeline += [dict(type="PackDetInputs")]
    dataset = dict(type="XMLDataset", data_root=str(tmp_path), ann_file="names.txt", img_subdir="")
    dataset |= dict(data_prefix=dict(sub_data_root=""), metainfo=dict(classes=["cell"]))
    dataset |= dict(test_mode=True, pipeline=pipeline)
    cfg = Config(dict(default_scope="mmdet", model={}, test_dataloader=dict(dataset=dataset)))
    init_default_scope("mmdet")
    load_tool("test").enable_tta(cfg)

    views = DATASETS.build(cfg.test_dataloader.dataset)[0]["data_samples"]
    assert [view.flip for view in views] == [False, True]
    assert views[0].gt_instances.bboxes.tensor.tolist() == [[1, 3, 9, 11]]  # counted from 0
