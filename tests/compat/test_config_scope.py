"""`mrla_mm::` names in config files."""

import sys

import pytest
from mmengine.config import Config

from mrla_mm.errors import InputError

NAME = "mask_rcnn_r50_mrla_light_1x.py"


@pytest.fixture
def parse(tmp_path):
    def from_text(text):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return Config.fromfile(file)

    return from_text


def test_bases_of_bases_and_lists_of_bases(parse, tmp_path):
    (tmp_path / "lower.py").write_text(f"_base_ = 'mrla_mm::{NAME}'\nlower = 2")
    (tmp_path / "other.py").write_text("extra = 3")
    config = parse("_base_ = ['./lower.py', './other.py']\nmodel = dict(rpn_head=dict(channels=7))")
    assert config.model.backbone.type == "MRLAResNet" and config.model.rpn_head.channels == 7
    assert config.lower == 2 and config.extra == 3
    config = parse(f"_base_ = 'mrla_mm::{NAME}'\nbackbone = _base_.model.backbone")
    assert config.backbone.type == "MRLAResNet" and "_scope_" not in config.backbone


def test_names_of_packages_are_found_without_pkg_resources(parse, monkeypatch):
    """setuptools 81 dropped it."""
    text = "_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'\ndetector = _base_.model"
    expected = parse(text)
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    config = parse(text)
    assert config.to_dict() == expected.to_dict() and config.detector._scope_ == "mmdet"
    with pytest.raises(InputError, match="nobody"):
        parse("_base_ = 'nobody::a/b.py'")
