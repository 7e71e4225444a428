"""Unknown keys and types anywhere in a config are named with the nearest known one, and no sound config is refused."""

import copy
import functools

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from mrla_mm.config import check_keys
from mrla_mm.config.signatures import accepted
from mrla_mm.errors import InputError

from ..conftest import ROOT

CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.py") if "_base_" not in path.parts)


@pytest.fixture(scope="module")
def original():
    return Config.fromfile(ROOT / "configs/retinanet_r50_mrla_light_1x.py")


@pytest.fixture
def cfg(original):
    return copy.deepcopy(original)


def said_of(cfg, **options):
    cfg.merge_from_dict({key.replace("__", "."): value for key, value in options.items()})
    with pytest.raises(InputError) as caught:
        check_keys(cfg)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_config_passes():
    """None of this package's own configs, of whatever host, has a key or type that is refused."""
    assert len(CONFIGS) > 90
    for path in CONFIGS:
        check_keys(Config.fromfile(path, import_custom_modules=False))


@pytest.mark.parametrize(
    "key, owner, meant",
    [
        ("train_dataloader.batchsize", "DataLoader", "batch_size"),
        ("train_dataloader.sampler.shufle", "DefaultSampler", "shuffle"),
        ("train_dataloader.dataset.data_rot", "CocoDataset", "data_root"),
        ("val_dataloader.dataset.pipeline.1.scal", "Resize", "scale"),
        ("train_cfg.max_epoch", "EpochBasedTrainLoop", "max_epochs"),
        ("val_evaluator.metrics", "CocoMetric", "metric"),
        ("val_evaluator.metrik", "CocoMetric", "metric"),
        ("default_hooks.checkpoint.intervall", "AtomicCheckpointHook", "interval"),
        ("optim_wrapper.optimiser", "OptimWrapper", "optimizer"),
        ("optim_wrapper.optimizer.learning_rate", "SGD", None),
        ("optim_wrapper.optimizer.weightdecay", "SGD", "weight_decay"),
        ("param_scheduler.0.start_facter", "LinearLR", "start_factor"),
        ("model.backbon", "RetinaNet", "backbone"),
        ("model.backbone.dept", "MRLAResNet", "depth"),
        ("model.backbone.layer_attention.head_chanels", "MRLALight", "head_channels"),
        ("model.neck.num_out", "FPN", "num_outs"),
        ("model.bbox_head.stacked_conv", "RetinaHead", "stacked_convs"),
        ("model.bbox_head.loss_cls.los_weight", "FocalLoss", "loss_weight"),
        ("model.train_cfg.assigner.pos_iou_th", "MaxIoUAssigner", "pos_iou_thr"),
        ("visualizer.nam", "DetLocalVisualizer", "name"),
        ("log_processor.windowsize", "LogProcessor", "window_size"),
        ("env_cfg.cudnn_bench", "env_cfg", "cudnn_benchmark"),
        ("randomness.sed", "randomness", "seed"),
    ],
)
def test_misspelt_keys_are_named(cfg, key, owner, meant):
    """Each key is named with its place, the class that would take it, and what it was perhaps meant to be."""
    place, _, name = key.rpartition(".")
    node = cfg
    for part in place.split("."):
        if not isinstance(node, list) and part not in node:
            node[part] = {}
        node = node[int(part) if isinstance(node, list) else part]
    node[name] = 1
    for change in (lambda: None, lambda: node.pop(meant or "lr", None)):  # beside the right key, and in its place
        change()
        said = said_of(cfg)
        assert said.startswith(f"{key}: {owner} has no argument {name!r}")
        assert f"did you mean {meant!r}?" in said if meant else ", lr, " in said


def test_unknown_types_and_missing_ones_are_named(cfg):
    """A type that no registry has is named with its neighbour; a hook without one is a misspelt hook's options."""
    said = said_of(cfg, model__type="RetinaNett", train_dataloader__dataset__type="CocoDatset")
    assert "train_dataloader.dataset.type='CocoDatset' is not a registered dataset; did you mean 'CocoDataset'?" in said
    assert "model.type='RetinaNett' is not a registered model; did you mean 'RetinaNet'?" in said
    cfg.model.type, cfg.train_dataloader.dataset.type = "RetinaNet", "CocoDataset"
    said = said_of(cfg, default_hooks__chekpoint__interval=2, custom_hooks=[dict(type="Unheard")])
    assert "default_hooks.chekpoint has no type; did you mean 'checkpoint'?" in said
    assert "custom_hooks.0.type='Unheard' is not a registered hook; import the module" in said


def test_many_faults_make_one_line(cfg):
    """The first few faults are named, the others counted."""
    said = said_of(cfg, **{f"train_cfg__wrong{number}": 1 for number in range(8)})
    assert said.count("has no argument") == 5 and said.endswith("; and 3 more")


@pytest.fixture
def own():
    """Register classes as a user would; they are taken out again."""
    added = []

    def register(registry, kind):
        registry.register_module(module=kind)
        added.append((registry, kind.__name__))
        return kind

    yield register
    for registry, name in added:
        registry.module_dict.pop(name)


def test_what_is_not_known_is_not_judged(cfg, own):
    """Free `**kwargs`, what a user's class builds itself, and a second loop's key pass; strict classes do not."""

    class FreeHook(Hook):
        def __init__(self, interval=1, **kwargs):
            self.rest = kwargs

    class Wrapper(nn.Module):
        def __init__(self, backbone):
            super().__init__()

    own(HOOKS, FreeHook)
    own(MODELS, Wrapper)
    cfg.custom_hooks = [dict(type="FreeHook", intervall=3, priority="LOW")]
    cfg.model.backbone = dict(type="Wrapper", backbone=dict(type="MRLAResNet", dept=3))
    cfg.model.neck = dict(type=nn.Identity)
    cfg.train_cfg = dict(by_epoch=False, max_iters=5)
    check_keys(cfg)
    assert "model.backbone.bakbone: Wrapper" in said_of(cfg, model__backbone__bakbone=1)


def test_what_a_user_builds_passes(cfg, own):
    """Several optimizers by a user's constructor, their schedulers, named backends and classes in place of names."""

    class Both:
        def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
            pass

    own(OPTIM_WRAPPER_CONSTRUCTORS, Both)
    sgd, linear = dict(type=torch.optim.SGD, lr=0.1), dict(type="LinearLR", start_factor=0.1, epoch_length=4)
    cfg.optim_wrapper = dict(_delete_=True, constructor="Both", first=dict(optimizer=sgd), second=dict(optimizer=sgd))
    cfg.param_scheduler = dict(first=[linear], second=dict(type="ConstantLR", factor=0.5, convert_to_iter_based=True))
    cfg.visualizer.vis_backends = [dict(type="LocalVisBackend", name="mine"), dict(type="LocalVisBackend")]
    check_keys(cfg)
    said = said_of(cfg, param_scheduler__first=[dict(type="LinearLR", start_facter=0.1)])
    assert said.startswith("param_scheduler.first.0.start_facter") and "did you mean 'start_factor'?" in said
    cfg.param_scheduler = dict(start_factor=0.1)
    assert "param_scheduler has no type" in said_of(cfg)


@pytest.mark.parametrize(
    "phases, judged",
    [(("train", "val"), ("train", "optim", "auto", "val")), (("test",), ("test",)), (("test", "tta"), ("test", "tta"))],
)
def test_only_what_will_run_is_judged(cfg, phases, judged):
    """A training has no use for the test's parts, a test none for the training's; what both build is always judged."""
    faulty = {
        "optim_wrapper.optimizer.type": "Unheard",
        "auto_scale_lr.basebatch": 16,
        "tta_model": dict(type="Unheard"),
        **{f"{phase}_dataloader.dataset.type": "Unheard" for phase in ("train", "val", "test")},
        **{f"{phase}_cfg.unheard": 1 for phase in ("train", "val", "test")},
        **{f"{phase}_evaluator.unheard": 1 for phase in ("val", "test")},
    }
    for key, value in faulty.items():
        one = copy.deepcopy(cfg)
        one.merge_from_dict({key: value})
        if key.startswith(judged):
            with pytest.raises(InputError, match=key.replace(".", r"\.")):
                check_keys(one, phases)
        else:
            check_keys(one, phases)
    cfg.model.type = "RetinaNett"
    with pytest.raises(InputError, match="RetinaNett"):
        check_keys(cfg, phases)


class Parent:
    def __init__(self, a, b=1):
        pass


class Hands(Parent):
    def __init__(self, c, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Takes(Parent):
    def __init__(self, **kwargs):
        self.d = kwargs.pop("d", 1)
        super().__init__(**kwargs)


class Skips(Hands, Parent):
    def __init__(self, **kwargs):
        super(Hands, self).__init__(**kwargs)


class Stores(Parent):
    def __init__(self, **kwargs):
        self.options = kwargs


@pytest.mark.parametrize(
    "kind, names, others",
    [
        (Parent, "ab", False),
        (Hands, "abc", False),
        (Takes, "", True),
        (Skips, "", True),
        (Stores, "", True),
        (dict, "", True),
        (functools.wraps(len)(lambda a, **kwargs: a), "", True),
    ],
)
def test_arguments_are_known_only_where_the_source_tells(kind, names, others):
    """A class that hands on its keywords untouched takes its parent's; any other use of them means any name."""
    assert accepted(kind) == (frozenset(names), others)
