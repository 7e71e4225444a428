"""What this package's parts of a config refuse ends a run before it begins, with its place in the config."""

import copy

import pytest
import torch
from mmdet.registry import WEIGHT_INITIALIZERS
from mmengine.config import Config
from mmengine.model import ConstantInit
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.registry import MODELS
from torch.fx.proxy import TraceError

from mrla_mm import backbones
from mrla_mm.backbones import LayerDecayOptimWrapperConstructor
from mrla_mm.config import check_keys, check_parts
from mrla_mm.errors import InputError

from ..conftest import ROOT


@pytest.fixture(scope="module")
def original():
    return Config.fromfile(ROOT / "configs/retinanet_r50_mrla_light_1x.py")


def said_of(cfg, options, check=check_parts):
    cfg = copy.deepcopy(cfg)
    cfg.merge_from_dict(options)
    with pytest.raises(InputError) as caught:
        check(cfg, ["train", "val"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layer_attention.type", "MRLAligth", ".layer_attention.type='MRLAligth' is no variant"),
        ("layer_attention.type", "MRLAligth", "did you mean 'MRLALight'?"),
        ("layer_attention.head_channels", 48, ".layer_attention.head_channels=48 does not cut channels=256"),
        ("layer_attention.head_channels", 48, "such as 32 or 64"),
        ("layer_attention.value", "conv", ".layer_attention.value='conv' must be"),
        ("layer_attention.head_chanels", 8, ".layer_attention.head_chanels: MRLALight has no argument"),
        ("layer_attention", 3, ".layer_attention=3 must be a dict"),
        ("norm_cfg.type", "BNN", ".norm_cfg={'type': 'BNN'"),
        ("layer_attention.type", ".MRLALight", ".layer_attention.type='.MRLALight' is no variant"),
        ("arch", "b0", ": MRLAResNet has no argument 'arch'; its size is set by depth"),
    ],
)
def test_what_a_backbone_refuses_is_named_with_its_place(original, key, value, expected):
    said = said_of(original, {f"model.backbone.{key}": value})
    assert said.startswith("model.backbone") and expected in said


def test_a_neck_is_built_too(original):
    neck = dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=256, strides=(4, 5))
    assert said_of(original, {"model.neck": neck}).startswith("model.neck.strides=(4, 5) must each be twice")


def test_building_on_trial_leaves_no_trace(original):
    """Random numbers of the run stay as they were, and parts of others are not built."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_parts(original, ["train"])
    assert torch.equal(torch.get_rng_state(), before)
    cfg = Config(dict(model=dict(backbone=dict(type="mmdet.ResNet", depth=3), neck=[dict(type="mmdet.FPN")])))
    check_parts(cfg, ["train"])
    check_parts(Config(dict(model=dict(type="RetinaNet"))), ["train"])


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_layer_decay_needs_something_to_share_out(name):
    """In a config with its place, and for who builds it in Python; mmpretrain's ends on a KeyError."""
    cfg = Config.fromfile(ROOT / "configs/retinanet_deit_t_mrla_light_1x.py")
    cfg.model.pop("backbone"), cfg.optim_wrapper.optimizer.pop(name)
    cfg.optim_wrapper.pop("paramwise_cfg")
    said = said_of(cfg, {})
    assert (
        said.startswith(f"optim_wrapper.optimizer.{name} is not given")
        and f"set optim_wrapper.optimizer.{name}" in said
    )
    check_parts(cfg, ["test"])
    with pytest.raises(InputError, match=f"optimizer.{name} is not given"):
        LayerDecayOptimWrapperConstructor(dict(optimizer=cfg.optim_wrapper.optimizer))


ARCH = dict(embed_dims=16, num_layers=1, num_heads=1, feedforward_channels=16)


@pytest.mark.parametrize("built", [MODELS.build, lambda cfg: getattr(backbones, cfg.pop("type"))(**cfg)])
@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (
            dict(type="MRLAResNet", depth=18, frozen_stage=1),
            "MRLAResNet has no argument 'frozen_stage'; did you mean 'frozen_stages'?",
        ),
        (dict(type="MRLAViT", arch=ARCH, norm_eval=True), "MRLAViT has no argument 'norm_eval'; it has no batch norms"),
        (dict(type="ViT", arch=ARCH, pretrained="w.pth"), "init_cfg=dict(type='Pretrained', checkpoint=...)"),
        (dict(type="MRLAPVTv2", norm_eval=True), "it has no batch norms"),
        (dict(type="PVTv2", depth=2), "its size is set by arch"),
        (dict(type="PVTv2", patch_sizes=(7, 3, 3, 3)), "PVTv2 sets patch_sizes itself; drop it"),
        (dict(type="MRLACeiT", out_typ="featmap"), "did you mean 'out_type'?"),
        (dict(type="MRLAEfficientNet", out_indexes=(3,)), "did you mean 'out_indices'?"),
    ],
)
def test_unknown_keywords_of_backbones_are_named(built, cfg, expected):
    """Those of mmdet and mmpretrain that ours hands on included, by config or directly."""
    with pytest.raises(InputError) as caught:
        built(dict(cfg))
    assert expected in str(caught.value)


def test_a_users_backbone_takes_keywords_of_its_own():
    """What a derived class takes out before it hands the rest on is none of ours."""

    class Mine(backbones.MRLAResNet):
        def __init__(self, depth, **kwargs):
            self.mine = kwargs.pop("mine")
            super().__init__(depth, **kwargs)

    assert Mine(18, mine=3, base_channels=32).base_channels == 32
    with pytest.raises(InputError, match="Mine has no argument 'mime'"):
        Mine(18, mine=3, mime=4)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("model=dict(backbone=dict(type='MRLAEfficientNet', arch='b0'))", "model.backbone", "MRLAEfficientNet 'depth'"),
        ("model=dict(backbone=dict(type='EfficientNet'))", "model.backbone", "EfficientNet 'depth'"),
        ("model=dict(backbone=dict(type='MRLAViT'))", "model.backbone", "MRLAViT 'depth'"),
        ("optim_wrapper=dict(optimizer=dict(type='AdamW'))", "optim_wrapper.optimizer", "AdamW 'momentum'"),
    ],
)
def test_what_is_left_over_from_a_base_is_answered_with_delete(tmp_path, text, path, said):
    """All of it in one sentence, over two files too; what the user wrote himself is a fault like any other."""
    owner, key = said.split()
    base, mine, over = tmp_path / "base.py", tmp_path / "mine.py", tmp_path / "over.py"
    base.write_text(f"_base_ = {str(ROOT / 'configs/retinanet_r50_mrla_light_1x.py')!r}\nwork_dir = 'here'")
    mine.write_text(f"_base_ = 'base.py'\n{text}")
    over.write_text("_base_ = 'mine.py'")

    def check(cfg, phases):
        check_keys(cfg, phases)
        check_parts(cfg, phases)

    for file in (mine, over):
        found = said_of(Config.fromfile(file), {}, check)
        assert found.startswith(f"{path}: {owner} has no argument {key}") and found.count("has no argument") == 1
        assert f"; write _delete_=True into {path}, so" in found
    options = {f"{path}.type": owner, f"{path}.arch": "b0"}
    assert f"; add --cfg-options {path}._delete_=True, so" in said_of(Config.fromfile(base), options, check)
    mine.write_text(f"_base_ = 'base.py'\n{text.replace(f'type={owner!r}', f'_delete_=True, type={owner!r}, wrong=1')}")
    found = said_of(Config.fromfile(mine), {}, check)
    assert f"{owner} has no argument 'wrong'" in found and "_delete_" not in found


def test_the_remedy_for_an_override_works(original):
    options = {"model.backbone.type": "MRLAEfficientNet", "model.backbone.arch": "b0"}
    cfg = copy.deepcopy(original)
    cfg.merge_from_dict({**options, "model.backbone._delete_": True})
    assert cfg.model.backbone == dict(type="MRLAEfficientNet", arch="b0")
    check_parts(cfg, ["train"])


def test_faults_of_a_config_without_a_file_stay_as_they_are(original):
    """As of mmengine's `Config.fromstring`, whose file is gone when it returns."""
    cfg = Config.fromstring(original.pretty_text, ".py")
    assert "MRLAResNet has no argument 'bad'" in said_of(cfg, {"model.backbone.bad": 1})


def test_a_part_of_a_list_is_written_anew(original):
    """Overrides of it are merged by mmengine, `_delete_` or not."""
    path = "train_dataloader.dataset.pipeline.2"
    said = said_of(original, {f"{path}.type": "RandomCrop", f"{path}.crop_size": (3, 3)}, check_keys)
    assert "RandomCrop has no argument 'scale', 'keep_ratio', left over from the Resize" in said
    assert "; write train_dataloader.dataset.pipeline anew in a config file, so" in said and "_delete_" not in said


def test_what_a_backbone_needs_is_named(original):
    said = said_of(original, {"model.backbone": dict(_delete_=True, type="MRLAViT")})
    assert said == "model.backbone: MRLAViT needs arch"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model.backbone.type": "MRLAResnet"}, "model.backbone.type='MRLAResnet' is not a registered model; did"),
        ({"model.backbone.type": "mmdet.MRLAResnet"}, "did you mean 'MRLAResNet'?"),
        ({"model.bbox_head.loss_cls.type": "FocalLos"}, "loss_cls.type='FocalLos' is not a registered model; did"),
        (
            {"model.backbone": dict(_delete_=True, type="torch.nn.Identity", inner=dict(type="MRLAResnet"))},
            "'MRLAResnet'",
        ),
        (
            {"optim_wrapper.constructor": "LayerDecayOptimConstructor"},
            "did you mean 'LayerDecayOptimWrapperConstructor'",
        ),
        (
            {"default_scope": None, "model.backbone.type": "MRLAResnet"},
            "model.backbone.type='MRLAResnet' is registered nowhere",
        ),
    ],
)
def test_near_misses_of_names_are_faults(original, options, expected):
    """Also where an owner may take a part apart, below what is not known, and without a scope."""
    said = said_of(original, options, check_keys)
    assert expected in said and said.count("did you mean") == 1


def test_names_that_are_registered_anywhere_or_far_are_left_alone(original):
    """A class of the user's, of another package, or one that only its owner understands."""

    class MRLAResNets(torch.nn.Module):
        pass

    MODELS.register_module(module=MRLAResNets)
    try:
        for name in ("MRLAResNets", "mmpretrain.ResNet", "EfficientNets", "mrlaresnet", "ViTs"):
            cfg = copy.deepcopy(original)
            cfg.merge_from_dict({"model.data_preprocessor.own": dict(type=name), "default_scope": None})
            check_keys(cfg, ["train", "val"])
    finally:
        MODELS.module_dict.pop("MRLAResNets")


def test_a_near_miss_in_a_section_of_another_phase_is_left_to_it():
    """Also where nothing is known but the names of this package's classes."""
    cfg = Config(dict(test_evaluator=dict(own=dict(type="MRLAResnet"))))
    check_keys(cfg, ["train", "val"])
    with pytest.raises(InputError, match="test_evaluator.own.type='MRLAResnet' is registered nowhere"):
        check_keys(cfg, ["test"])


def test_an_initialiser_is_known_by_every_name_that_mmengine_takes():
    """Of a host's own registry, with a scope, and by the full path that a saved config of classes has."""

    class Ours(ConstantInit):
        """Fills with one number."""

    kinds = ["mmengine.Pretrained", "mmengine.model.PretrainedInit", ConstantInit, "InitOfMmdet"]
    WEIGHT_INITIALIZERS.register_module(name="InitOfMmdet", module=Ours)
    try:
        with MODELS.switch_scope_and_registry("mmdet"):
            for kind in kinds:
                MODELS.build(dict(type="MRLAResNet", depth=18, base_channels=32, init_cfg=dict(type=kind)))
            with pytest.raises(InputError, match="initialiser"):
                MODELS.build(dict(type="MRLAResNet", depth=18, base_channels=32, init_cfg=dict(type="InitOfMmde")))
    finally:
        del WEIGHT_INITIALIZERS.module_dict["InitOfMmdet"]


@pytest.mark.parametrize("value", ["backbone", ["neck", "backbone.layer1"]])
def test_mmengine_is_not_asked_to_fold_norms_it_cannot_trace(original, value):
    said = said_of(original, dict(efficient_conv_bn_eval=value))
    assert said.startswith(f"efficient_conv_bn_eval={value!r}: mmengine cannot trace MRLAResNet; leave 'backbone' out")
    assert said_of(original, dict(efficient_conv_bn_eval=True)).startswith("efficient_conv_bn_eval=True must be a list")
    for options in (dict(efficient_conv_bn_eval="neck"), {"efficient_conv_bn_eval": None}):
        cfg = copy.deepcopy(original)
        cfg.merge_from_dict(options)
        check_parts(cfg, ["train", "val"])
    plain = Config.fromfile(ROOT / "configs/retinanet_r50_1x.py")
    plain.efficient_conv_bn_eval = value
    check_parts(plain, ["train", "val"])
    with pytest.raises(TraceError):
        turn_on_efficient_conv_bn_eval(torch.nn.ModuleDict(dict(backbone=backbones.MRLAResNet(18))), "backbone")
