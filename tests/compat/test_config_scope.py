import importlib.util

import pytest
from mmengine.config import Config

from mrla_mm import compat
from mrla_mm.compat.config_scope import config_path
from mrla_mm.errors import InputError

NAME = "mask_rcnn_r50_mrla_light_1x.py"


@pytest.fixture
def parse(tmp_path):
    def from_text(text):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return Config.fromfile(file)

    return from_text


def test_a_users_config_inherits_ours_with_its_nested_bases(parse):
    config = parse(f"_base_ = 'mrla_mm::{NAME}'\nmodel = dict(roi_head=dict(bbox_head=dict(num_classes=3)))")
    assert config.model.backbone.type == "MRLAResNet"
    assert config.model.roi_head.bbox_head.num_classes == 3
    assert config.model.roi_head.mask_head.type == "FCNMaskHead"  # two bases down, in mmdet


def test_bases_of_bases_and_lists_of_bases(parse, tmp_path):
    (tmp_path / "lower.py").write_text(f"_base_ = 'mrla_mm::{NAME}'\ntest_cfg = dict(type='MyLoop')")
    (tmp_path / "other.py").write_text("extra = 3")
    config = parse("_base_ = ['./lower.py', './other.py']\nmodel = dict(rpn_head=dict(in_channels=7))")
    assert config.model.backbone.type == "MRLAResNet" and config.model.rpn_head.in_channels == 7
    assert config.test_cfg.type == "MyLoop" and config.extra == 3


def test_mmdet_bases_still_work_and_keep_their_scope(parse):
    config = parse("_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'\ndetector = _base_.model")
    assert config.model.type == "RetinaNet" and config.detector._scope_ == "mmdet"


def test_a_config_of_a_package_is_looked_up_once(monkeypatch):
    first = Config._get_cfg_path("mmdet::_base_/models/retinanet_r50_fpn.py", "mine.py")
    monkeypatch.setattr("mmengine.config.config._get_external_cfg_path", lambda *args: pytest.fail("looked up again"))
    assert Config._get_cfg_path("mmdet::_base_/models/retinanet_r50_fpn.py", "other/yours.py") == first
    assert first[1] == "mmdet" and Config._get_cfg_path("near.py", "other/yours.py") == ("other/near.py", None)


def test_a_base_variable_of_ours_gets_no_scope(parse):
    config = parse(f"_base_ = 'mrla_mm::{NAME}'\nbackbone = _base_.model.backbone")
    assert config.backbone.type == "MRLAResNet" and config.backbone.get("_scope_") != "mrla_mm"


@pytest.mark.parametrize("name", [NAME, NAME.removesuffix(".py"), f"mrla_mm::{NAME}"])
def test_config_path(name):
    assert Config.fromfile(config_path(name)).model.type == "MaskRCNN"


def test_an_unknown_name_lists_the_closest(parse):
    with pytest.raises(InputError, match=f"maskrcnn_r50_mrla_light.py.*did you mean .*mrla_mm::{NAME}"):
        parse("_base_ = 'mrla_mm::maskrcnn_r50_mrla_light.py'")


@pytest.mark.parametrize("name", ["../setup.py", "/etc/passwd", "zzzz"])
def test_nothing_outside_the_configs_is_found(name):
    with pytest.raises(InputError, match="no config named"):
        config_path(name)


def test_other_packages_go_to_mmengine_unchanged(parse):
    with pytest.raises(ValueError, match="please specify the package name"):
        parse("_base_ = 'mmdet::no_folder.py'")
    with pytest.raises(AssertionError, match="does not support to load nobody"):
        parse("_base_ = 'nobody::a/b.py'")


def test_missing_pkg_resources_is_explained(parse, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pkg_resources" else find_spec(name))
    with pytest.raises(InputError, match='pip install "setuptools<81"'):
        parse("_base_ = 'mmdet::_base_/default_runtime.py'")


def test_installing_again_wraps_once():
    before = Config._get_cfg_path
    compat.install()
    assert Config._get_cfg_path is before
