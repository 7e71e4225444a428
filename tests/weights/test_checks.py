"""Weights are fetched and read before a run: each way of not having them says what to do."""

import urllib.error

import pytest
from mmengine.config import Config
from mmengine.model.weight_init import PretrainedInit

from mrla_mm.backbones import MRLAEfficientNet
from mrla_mm.errors import InputError
from mrla_mm.weights import StrictPretrained, check_checkpoint, check_weights, files, without_pretrained

from .conftest import checkpoint_bytes


def config(checkpoint=None, *, backbone=None, **more):
    backbone = dict(type="MRLAResNet", depth=18) | (backbone or {})
    if checkpoint is not None:
        backbone["init_cfg"] = dict(type="Pretrained", checkpoint=str(checkpoint))
    return Config(dict(model=dict(type="RetinaNet", backbone=backbone), **more))


@pytest.fixture
def offline(monkeypatch, cache):
    """No network, and an empty download cache; returns the folder of the cache."""

    def refuse(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(files.urllib.request, "urlopen", refuse)
    return cache


def message(cfg):
    with pytest.raises(InputError) as caught:
        check_weights(cfg)
    return str(caught.value)


def test_missing_file_names_path_and_option(tmp_path):
    """A local path that is not there is named with the option that starts without it."""
    said = message(config(tmp_path / "resnet.pth"))
    assert str(tmp_path / "resnet.pth") in said and "--cfg-options model.backbone.init_cfg=None" in said


def test_empty_file(tmp_path):
    """An empty file is no weights."""
    (tmp_path / "w.pth").touch()
    assert "empty file" in message(config(tmp_path / "w.pth"))


def test_existing_file_passes(tmp_path):
    """A file that is there is left alone."""
    (tmp_path / "w.pth").write_bytes(checkpoint_bytes())
    check_weights(config(tmp_path / "w.pth"))


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("load_from", dict(), "set load_from=None"),
        ("--resume", dict(resume=True), "continue from another one"),
        ("checkpoint", dict(training=False), "give another file"),
    ],
)
def test_a_checkpoint_is_called_as_the_user_named_it(tmp_path, name, options, remedy):
    """One that is not there, and one that is none, whatever is wrong with the rest of the run."""
    file, training = tmp_path / "epoch_1.pth", options.pop("training", True)
    cfg = config(tmp_path / "gone.pth", load_from=str(file), **options)
    for content, said in (
        (None, "do not exist"),
        (b"not a checkpoint", "no PyTorch checkpoint"),
        (checkpoint_bytes({"meta": {"epoch": 1}, "optimizer": {}}), "there is no tensor among meta, optimizer"),
    ):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(InputError, match=rf"^{name}: weights .*epoch_1\.pth.*{said}.*; or {remedy}$"):
            check_checkpoint(cfg, training=training)
    file.write_bytes(checkpoint_bytes())
    check_checkpoint(cfg, training=training)


@pytest.mark.parametrize(
    "location, file",
    [
        ("torchvision://resnet50", "resnet50-0676ba61.pth"),
        ("https://example.org/a/weights.pth?raw=1", "weights.pth"),
        ("mmcls://resnet50", "resnet50_8xb32_in1k_20210831-ea4938fc.pth"),
        ("open-mmlab://detectron/resnet50_caffe", "resnet50_caffe-788b5fa3.pth"),
    ],
)
def test_unreachable_says_where_to_put_the_file(offline, location, file):
    """Offline, the message has the reason, the place in the cache and the option; the right file there suffices."""
    said = message(config(location))
    assert "no route to host" in said and str(offline / file) in said and "model.backbone.init_cfg=None" in said
    (offline / file).write_bytes(checkpoint_bytes())
    if "-" not in file:
        check_weights(config(location))
    else:  # no other file than the published one will do
        assert f"its name says {file.rpartition('-')[2].removesuffix('.pth')}" in message(config(location))


def test_unknown_name_has_neighbours():
    """A misspelt catalogue name is answered with the nearest ones."""
    said = message(config("torchvision://resnet5O"))
    assert "'resnet5O'" in said and "resnet50" in said


def test_urls_are_fetched_before_the_run(serve, cache):
    """Preflight leaves the file in the cache, where the run finds it; one that does not exist is reported."""
    address = serve({"/there.pth": checkpoint_bytes()})
    check_weights(config(f"{address}/there.pth"))
    assert (cache / "there.pth").read_bytes() == checkpoint_bytes()
    assert "404" in message(config(f"{address}/gone.pth"))


NAMES = ["mmengine.Pretrained", PretrainedInit, "mmengine.model.weight_init.PretrainedInit", StrictPretrained]


@pytest.mark.filterwarnings("error:THE BACKBONE")
@pytest.mark.parametrize("kind", NAMES)
def test_the_class_is_known_as_well_as_its_name(kind, tmp_path):
    """Configs that import classes: a missing file is found, one that is there is enough for frozen layers."""
    frozen = dict(frozen_stages=1, norm_eval=True)
    cfg = config(tmp_path / "w.pth", backbone=frozen)
    cfg.model.backbone.init_cfg.type = kind
    assert message(cfg).startswith("model.backbone.init_cfg: ")
    (tmp_path / "w.pth").write_bytes(checkpoint_bytes())
    check_weights(cfg)
    assert without_pretrained(cfg.model).backbone.init_cfg is None


def test_weights_of_every_part_are_checked(tmp_path):
    """Pretrained weights of any module of the model are found, in lists too."""
    cfg = config()
    cfg.model.roi_head = dict(
        bbox_head=[dict(), dict(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "h")))]
    )
    assert message(cfg).startswith("model.roi_head.bbox_head.1.init_cfg: ")


def test_resume_needs_no_pretrained_weights(tmp_path):
    """A run that continues from a checkpoint does not ask for the weights it once started from."""
    checkpoint = tmp_path / "epoch_1.pth"
    checkpoint.write_bytes(checkpoint_bytes())
    check_weights(config(tmp_path / "gone.pth", resume=True, load_from=str(checkpoint)))


def test_without_pretrained_leaves_all_else(tmp_path):
    """What loads a file goes, whatever module it is of; other values stay, and so does the config itself."""
    xavier, file = dict(type="Xavier", layer="Linear"), dict(type="Pretrained", checkpoint="w.pth")
    model = dict(
        pretrained="torchvision://resnet50",
        backbone=dict(depth=50, init_cfg=file),
        head=[dict(init_cfg=[xavier, file])],
    )
    kept = dict(pretrained=None, backbone=dict(depth=50, init_cfg=None), head=[dict(init_cfg=[xavier])])
    cfg = Config(dict(model=model))
    assert without_pretrained(cfg.model) == kept
    assert cfg.model.backbone.init_cfg == file


@pytest.mark.parametrize(
    ("frozen", "key", "value"),
    [
        (dict(frozen_stages=1), "frozen_stages", 1),
        (dict(frozen_stages=0), "frozen_stages", 0),
        (dict(norm_eval=True), "norm_eval", True),
        ({}, "norm_eval", True),
    ],
)
def test_frozen_random_layers_warn(frozen, key, value):
    """Frozen layers without weights are warned of, with the option that frees them; norm_eval is ResNet's default."""
    with pytest.warns(UserWarning, match=f"(?s)RANDOM WEIGHTS.*{key}={value}.*backbone.{key}=(-1|False)"):
        check_weights(config(backbone=frozen))


@pytest.mark.filterwarnings("error:THE BACKBONE")
@pytest.mark.parametrize(
    "backbone",
    [
        [dict(type="ResNet"), dict(type="ResNet")],
        "resnet50",
        dict(type="Mine", frozen_stages=[0, 1], norm_cfg="BN"),
        dict(type="Mine", frozen_stages=None),
    ],
)
def test_backbones_of_a_users_own_kind_are_left_alone(backbone):
    check_weights(Config(dict(default_scope="mmdet", model=dict(type="Mine", backbone=backbone))))


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        (dict(type="MRLAResNet", frozen_stages=1, norm_eval=True), ["frozen_stages=-1", "norm_eval=False"]),
        (dict(type="MRLAResNet", frozen_stages=0), ["frozen_stages=-1", "norm_eval=False"]),
        (dict(type="MRLAResNet", frozen_stages=0, norm_cfg=dict(type="GN", num_groups=4)), ["frozen_stages=-1"]),
        (dict(type="mmdet.ResNet", norm_eval=False), []),
        (dict(type="MRLAViT"), []),
        (dict(type="MRLAPVTv2", frozen_stages=2), ["frozen_stages=0"]),
        (dict(type="mmdet.EfficientNet", frozen_stages=0, norm_eval=True), ["norm_eval=False"]),
        (dict(type=MRLAEfficientNet, frozen_stages=1), ["frozen_stages=0"]),
    ],
)
def test_the_way_out_fits_the_backbone(backbone, options, tmp_path):
    """Weights that are not there: the options shown are those that this backbone takes and needs."""
    with pytest.raises(InputError) as caught:
        check_weights(config(tmp_path / "none.pth", backbone=backbone))
    shown = str(caught.value).rpartition("--cfg-options ")[2].split()
    assert shown == ["model.backbone.init_cfg=None", *(f"model.backbone.{option}" for option in options)]


@pytest.mark.filterwarnings("error:THE BACKBONE")
def test_no_warning_with_weights(tmp_path):
    """Weights of the backbone, a checkpoint, or nothing frozen: no warning."""
    (tmp_path / "w.pth").write_bytes(checkpoint_bytes())
    check_weights(config(tmp_path / "w.pth", backbone=dict(frozen_stages=1, norm_eval=True)))
    check_weights(config(backbone=dict(frozen_stages=1), load_from=str(tmp_path / "w.pth")))
    check_weights(config(backbone=dict(frozen_stages=-1, norm_eval=False)))
    check_weights(config(backbone=dict(type="MRLAPVTv2")))
    check_weights(config(backbone=dict(type="NoSuchBackbone")))
