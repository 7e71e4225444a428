"""Reading configs: where they are found, what overrides do, and which are warned of."""

import sys
import warnings

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.attention import MRLABase, MRLALight
from mrla_mm.config import read_config
from mrla_mm.errors import InputError

from .backbones.common import branches
from .conftest import ROOT

FASTER = "mrla_mm::faster_rcnn_r50_mrla_light_1x.py"


def read(name, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        cfg = read_config(str(name), options)
    return cfg, [str(each.message) for each in caught if "--cfg-options" in str(each.message)]


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("model.test_cfg.rcnn.score_thresh", "model.test_cfg.rcnn.score_thr"),
        ("train_dataloader.dataset.pipeline.2.keepratio", "dataset.pipeline.2.keep_ratio"),
        ("optim_wraper.optimizer.lr", "optim_wrapper"),
        ("train_pipeline", "variable"),  # its value is in the data set already
    ],
)
def test_an_option_that_nothing_reads_is_named_once_with_the_nearest(option, nearest):
    _, said = read(FASTER, **{option: 1})
    assert len(said) == 1 and option in said[0] and nearest in said[0].split(option, 1)[1]
    assert "\n" not in said[0]


@pytest.mark.parametrize("option", ["model.backbone.type.x", "train_pipeline.99.type"])
def test_an_option_that_does_not_fit_is_refused(option):
    with pytest.raises(InputError, match="--cfg-options"):
        read(FASTER, **{option: 35})


def test_options_that_are_read_say_nothing():
    right = {
        "model.backbone.init_cfg": None,
        "train_dataloader.dataset.pipeline.2.scale": (96, 64),
        "train_dataloader.batch_size": 4,
        "randomness.seed": 3,
        "load_from": "weights.pth",
        "data_root": "/elsewhere",
    }
    cfg, said = read(FASTER, **right)
    assert not said
    assert cfg.model.backbone.init_cfg is None
    assert cfg.train_dataloader.dataset.pipeline[2].scale == (96, 64)
    assert cfg.randomness.seed == 3 and cfg.load_from == "weights.pth"


def test_data_root_moves_data_sets_and_evaluators(tmp_path):
    cfg, _ = read(FASTER, data_root="data/coco/mini")
    assert cfg.val_evaluator.ann_file == "data/coco/mini/annotations/instances_val2017.json"
    kept = dict(metainfo=dict(classes=["sets/own"]), names=("sets/own",), img="sets/owner")
    sets = dict(kept, data_root="sets/own", ann_file="sets/own/a.json")
    loaders = {f"{name}_dataloader": dict(dataset=dict(sets)) for name in ("train", "val")}
    Config(dict(loaders, data_root="data/coco/")).dump(tmp_path / "own.py")
    cfg, _ = read(tmp_path / "own.py", data_root="/new")
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        moved = dict(data_root="/new/", ann_file="/new/a.json")
        assert loader.dataset.to_dict() == kept | moved
    loaders["val_dataloader"]["dataset"]["data_root"] = "sets/other"
    Config(loaders).dump(tmp_path / "own.py")
    with pytest.raises(InputError, match="2 folders .sets/other, sets/own"):
        read(tmp_path / "own.py", data_root="/new")
    Config(dict(loaders, data_root="sets")).dump(tmp_path / "own.py")
    cfg, _ = read(tmp_path / "own.py", data_root="/new")
    assert cfg.val_dataloader.dataset.data_root == "/new/other"
    with pytest.raises(InputError, match="empty"):
        read(tmp_path / "own.py", data_root="")


def test_a_config_that_does_not_exist():
    with pytest.raises(InputError, match="'nopackage'"):
        read_config("nopackage::a.py", {})
    for name in ("mrla_mm::gone.py", "mmdet::gone.py", "configs/gone.py"):
        with pytest.raises(InputError, match="gone.py"):
            read_config(name, {})
    with pytest.raises(InputError, match="retinanet_r50_mrla_light_1x"):
        read_config("mrla_mm::retinanet_r50_mrla_ligth_1x.py", {})


@pytest.mark.parametrize("text", ["_base_ = 'gone.py'", "x = (", "x = 1 / 0"])
def test_a_config_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(InputError, match="bad.py"):
        read_config(str(tmp_path / "bad.py"), {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("data_root = 'sets/pets/'", "data_root"),
        ("train_pipeline = [dict(type='LoadImageFromFile')]", "train_pipeline"),
        ("optim_wraper = dict(optimizer=dict(lr=0.5))", "optim_wrapper"),
    ],
)
def test_variables_of_a_config_that_nothing_reads_are_named(line, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"_base_ = '{FASTER}'\n{line}")
    with pytest.warns(UserWarning, match=f"nothing reads .*{said}"):
        cfg = read_config(str(path), {})
    cfg.dump(tmp_path / "dumped.py")
    same = "data_root = 'data/coco/'\nnorm_cfg = dict(type='BN', requires_grad=True)"
    used = "x = 7\nmodel = dict(rpn_head=dict(channels=x))"
    custom = "custom_imports = dict(imports=['mrla_mm', 'mrla_mm.errors'])"
    path.write_text(f"_base_ = '{FASTER}'\n{same}\n{used}\n{custom}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        read_config(str(path), {})
        read_config(str(tmp_path / "dumped.py"), {})


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*nothing reads")
def test_our_configs_have_only_variables_that_are_read():
    for path in (ROOT / "configs").rglob("*.py"):
        read_config(str(path), {})


def test_a_loader_without_workers_keeps_none(tmp_path):
    cfg, _ = read(FASTER, **{"train_dataloader.num_workers": 0})
    assert cfg.train_dataloader.persistent_workers is False
    assert cfg.val_dataloader.persistent_workers is True


def backbone_of(cfg):
    init_default_scope(cfg.default_scope)
    return MODELS.build({**cfg.model.backbone, "init_cfg": None})


LIGHT = "mrla_mm::transformers/mask_rcnn_pvtv2_b0_mrla_light_1x.py"


def test_the_plain_twin_of_a_config(tmp_path):
    by_option, said = read(LIGHT, **{"model.backbone.layer_attention": None})
    update = "model = dict(backbone=dict(layer_attention=None))"
    (tmp_path / "twin.py").write_text(f'_base_ = "{LIGHT}"\n{update}\n')
    inherited, _ = read(tmp_path / "twin.py")
    assert not said and branches(backbone_of(read(LIGHT)[0]))
    for cfg in (by_option, inherited):
        assert not branches(backbone_of(cfg))


def test_a_config_with_python_imports(tmp_path):
    (tmp_path / "base.py").write_text(
        "from mrla_mm.attention import MRLABase\n"
        "from mrla_mm.backbones import MRLAResNet\n"
        "attention = dict(type=MRLABase, head_channels=16)\n"
        "backbone = dict(type=MRLAResNet, depth=18, layer_attention=attention)\n"
        'default_scope = "mmdet"\n'
        "model = dict(backbone=backbone)\n"
    )
    (tmp_path / "child.py").write_text(
        "from mmengine.config import read_base\n"
        "from mrla_mm.attention import MRLALight\n"
        "with read_base():\n"
        "    from .base import *\n"
        "model.update(dict(backbone=dict(depth=34, layer_attention=MRLALight)))\n"
    )
    for name, depth, variant in (("base", 8, MRLABase), ("child", 16, MRLALight)):
        cfg, _ = read(tmp_path / f"{name}.py")
        found = branches(backbone_of(cfg))
        assert [type(branch.attention) for branch in found] == [variant] * depth


def test_bases_of_bases_and_lists_of_bases(tmp_path):
    (tmp_path / "lower.py").write_text(f"_base_ = '{FASTER}'\nlower = 2")
    (tmp_path / "other.py").write_text("extra = 3")
    bases = "_base_ = ['./lower.py', './other.py']\n"
    (tmp_path / "mine.py").write_text(f"{bases}model = dict(rpn_head=dict(channels=7))")
    cfg = Config.fromfile(tmp_path / "mine.py")
    assert cfg.model.backbone.type == "MRLAResNet" and cfg.model.rpn_head.channels == 7
    assert cfg.lower == 2 and cfg.extra == 3
    (tmp_path / "mine.py").write_text(f"_base_ = '{FASTER}'\nbackbone = _base_.model.backbone")
    cfg = Config.fromfile(tmp_path / "mine.py")
    assert cfg.backbone.type == "MRLAResNet" and "_scope_" not in cfg.backbone


def test_names_of_packages_are_found_without_pkg_resources(tmp_path, monkeypatch):
    """setuptools 81 dropped it."""
    base = "_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'\n"
    (tmp_path / "mine.py").write_text(f"{base}detector = _base_.model")
    expected = Config.fromfile(tmp_path / "mine.py")
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    cfg = Config.fromfile(tmp_path / "mine.py")
    assert cfg.to_dict() == expected.to_dict() and cfg.detector._scope_ == "mmdet"
    (tmp_path / "mine.py").write_text("_base_ = 'nobody::a/b.py'")
    with pytest.raises(InputError, match="nobody"):
        Config.fromfile(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["evil.yaml", "harmless.json"])
def test_yaml_which_mmengine_executes_is_refused(name, tmp_path):
    victim, path = tmp_path / "created", tmp_path / name
    command = f"model: !!python/object/apply:os.makedirs ['{victim}', 511, true]"
    (tmp_path / "evil.yaml").write_text(command)
    (tmp_path / "harmless.json").write_text('{"_base_": "evil.yaml"}')
    with pytest.raises(InputError, match="YAML"):
        read_config(str(path), {})
    assert not victim.exists()
    Config.fromfile(path)
    assert victim.exists(), "the config is harmless: the case tests nothing"
