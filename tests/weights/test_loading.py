"""Pretrained weights: every accepted form loads entirely, everything else stops with an error."""

import copy

import pytest
import torch
import torchvision
from mmengine.model.weight_init import PretrainedInit

from mrla_mm.backbones import MRLAPVTv2, MRLAResNet
from mrla_mm.errors import InputError
from mrla_mm.weights import KeyStatus, convert, load_weights, read_checkpoint

from ..conftest import needs_recent_torch
from .conftest import (
    BASE,
    LIGHT,
    VARIANTS,
    narrow,
    plain_resnet,
    prefixed,
    random_layers,
    released_resnet,
    same,
    save,
    scatter,
    without,
)
from .test_hooks import THREE_STAGES, Detector


def initialised(init_cfg):
    built = narrow(init_cfg=init_cfg)
    built.init_weights()
    return built


def backbone(checkpoint, kind="Pretrained", **options):
    return initialised(dict(type=kind, checkpoint=str(checkpoint), **options))


def message(*args, **kwargs):
    with pytest.raises(InputError) as caught:
        backbone(*args, **kwargs)
    return str(caught.value)


CLASSIFIER = {"head.fc.weight": torch.zeros(2, 2)}
COUNTER = {"steps": torch.tensor(4)}
FORMS = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "meta": {}},
    "detector": lambda s: {"state_dict": CLASSIFIER | prefixed(s, "backbone."), "meta": {}},
    "ddp": lambda s: prefixed(s, "module."),
    "ddp-classifier": lambda s: prefixed(prefixed(s, "backbone.") | CLASSIFIER, "module."),
    "mmengine-ema": lambda s: {"ema_state_dict": prefixed(s, "module.backbone.") | COUNTER},
    "timm-ema": lambda s: {"state_dict_ema": prefixed(s, "module.")},
    "averaged": lambda s: {key: value.float() for key, value in s.items()},  # counters too
    "nested": lambda s: {"model": {"state_dict": s}},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_accepted_forms(form, trained, tmp_path):
    assert same(backbone(save(tmp_path, form(trained))).state_dict(), trained)


def test_of_several_models_the_trained_or_the_one_asked_for_is_loaded(trained, tmp_path):
    other = {key: value + 1 for key, value in trained.items()}
    path = save(tmp_path, {"model": trained, "model_ema": other})
    assert same(backbone(path).state_dict(), trained)
    assert same(backbone(path, entry="model_ema").state_dict(), other)
    assert "'ema'" in message(path, entry="ema")
    path = save(tmp_path, prefixed(trained, "student.net.") | prefixed(other, "teacher.net."))
    assert same(backbone(path, prefix="student.net").state_dict(), trained)
    assert "nothing was loaded" in message(path)
    assert "nobody." in message(path, prefix="nobody")


@VARIANTS
def test_files_of_the_authors(variant, attention, tmp_path):
    path = save(tmp_path, {"state_dict": prefixed(released_resnet(variant), "module.")})
    report = load_weights(model := narrow(18, attention), path)
    assert same(model.state_dict(), scatter(narrow(18, attention), seed=1).state_dict())
    assert report.keys[KeyStatus.OUTSIDE] == ["head.fc.weight", "head.fc.bias"]


@pytest.mark.parametrize("deep_stem", [False, True])
def test_the_authors_other_base_model_is_refused(deep_stem, tmp_path):
    """With a deep stem it has a ReLU in each branch, which ours lack and no key tells."""
    state = released_resnet("base")
    stem = state.pop("conv1.weight")
    state |= {f"conv1.{index}.weight": stem for index in (0, 3, 6)}
    with pytest.raises(InputError):
        load_weights(narrow(18, BASE, deep_stem=deep_stem), save(tmp_path, state))


def test_torchvision_resnet50_is_a_warm_start(tmp_path):
    plain = without(torchvision.models.resnet50().state_dict(), "num_batches_tracked")
    plugins = [dict(cfg=dict(type="ContextBlock", ratio=1 / 4), position="after_conv3")]
    report = load_weights(MRLAResNet(50, plugins=plugins), save(tmp_path, plain))
    assert len(report.keys[KeyStatus.MATCHED]) == len(plain) - 2 and not report.faults()
    assert len(report.keys[KeyStatus.NEW_ATTENTION]) == 16 * 9
    assert any("context_block" in key for key in report.keys[KeyStatus.MAY_BE_MISSING])
    assert "starts as an exact identity" in report.table()


WRONG = {
    "no weights": (lambda s: {"meta": {}, "epoch": 1}, "no weights"),
    "deeper": (lambda s: released_resnet("light", 34), "layer1.2.conv1.weight"),
    "wider": (lambda s: plain_resnet(50), "(16, 16, 1, 1) in the file, (16, 16, 3, 3) in"),
    "other": (lambda s: torchvision.models.squeezenet1_1().state_dict(), "prefix="),
    "part-of-attention": (lambda s: without(s, "layer2.0.mrla.attention.query"), "layer2.0"),
    "no-norm": (lambda s: without(s, "layer1.0.bn2.running_var"), "layer1.0.bn2.running_var"),
    "base": (lambda s: released_resnet("base"), "attention.history_scale"),
}


@pytest.mark.parametrize(("make", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_architecture_loads_nothing(make, expected, trained, tmp_path):
    path = save(tmp_path, make(trained))
    model = narrow(18, LIGHT, init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError) as caught:
        model.init_weights()
    assert expected in str(caught.value)
    assert same(model.state_dict(), before)


TWICE = {
    "wrapper": (lambda s: prefixed(s, "module."), "module.conv1"),
    "names of the authors": (lambda s: released_resnet("light"), ".lambda_t"),
    "heads": (lambda s: {"fc.weight": torch.ones(2), "head.fc.weight": torch.ones(2)}, "fc"),
}


@pytest.mark.parametrize(("make", "other"), TWICE.values(), ids=TWICE)
def test_two_tensors_for_one_key_of_the_model(make, other, trained, tmp_path):
    found = message(save(tmp_path, trained | make(trained)))
    assert "two tensors" in found and other in found


def test_values_that_the_model_cannot_hold(trained, tmp_path):
    key = "layer2.0.conv1.weight"
    content = dict(trained)
    content[key] = content[key].double()
    assert torch.equal(backbone(save(tmp_path, content)).state_dict()[key], trained[key])
    content[key] = content[key] + 1e300
    assert key in message(save(tmp_path, content))


@needs_recent_torch
def test_nested_tensors_are_refused(trained, tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "conv1.weight" in message(save(tmp_path, trained | {"conv1.weight": nested}))


def test_shapes_are_compared_before_values(trained, tmp_path):
    """A view may claim any number of elements, and reading them would take memory for each."""
    key = "layer2.0.conv1.weight"
    found = message(save(tmp_path, trained | {key: torch.zeros(1).expand(2**40)}))
    assert key in found and "1099511627776" in found


def test_plain_weights_for_deformable_convolutions(tmp_path):
    path = save(tmp_path, plain_resnet(50))
    deformable = dict(dcn=dict(type="DCNv2"), stage_with_dcn=(False, True, True, True))
    report = load_weights(narrow(50, **deformable), path)
    assert not report.faults() and len(report.keys[KeyStatus.MAY_BE_MISSING]) == 2 * (4 + 6 + 3)
    assert all(".conv2.conv_offset." in key for key in report.keys[KeyStatus.MAY_BE_MISSING])


def test_what_matches_by_explicit_request_only(trained, tmp_path):
    path = save(tmp_path, without(trained, "layer4."))
    assert "layer4" in message(path)
    loaded = backbone(path, strict=False).state_dict()
    assert torch.equal(loaded["layer3.0.conv1.weight"], trained["layer3.0.conv1.weight"])
    other = save(tmp_path, torchvision.models.squeezenet1_1().state_dict(), "other.pth")
    assert message(other, strict=False), "nothing at all is never what was wanted"
    report = load_weights(narrow(18, LIGHT, **THREE_STAGES), save(tmp_path, trained))
    assert "no such part" in report.table() and "layer4." in report.table()


@pytest.mark.parametrize("kind", [PretrainedInit, "mmengine.PretrainedInit"])
def test_configs_that_name_the_class_are_strict_too(kind, trained, tmp_path):
    path = save(tmp_path, prefixed(trained, "backbone."))
    assert same(backbone(path, kind=kind).state_dict(), trained)
    assert "nothing was loaded" in message(save(tmp_path, without(trained, "layer4.")), kind=kind)


def test_other_entries_of_init_cfg_come_first(trained, tmp_path):
    plain = without(trained, ".mrla.")
    files = dict(type="Pretrained", checkpoint=str(save(tmp_path, plain)))
    cfg = [files, dict(type="Constant", layer=["Conv1d", "Conv2d"], val=0.25)]
    built = initialised(cfg)
    state = built.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.items())
    assert state["layer1.0.mrla.attention.query.weight"].eq(0.25).all() and built.init_cfg == cfg
    built.init_weights()
    assert same(built.state_dict(), state)


def test_a_models_initialisation_leaves_what_its_backbone_loaded(trained, tmp_path):
    path = save(tmp_path, prefixed(trained, "net."))
    detector = Detector(init_cfg=dict(type="Pretrained", checkpoint=str(path), prefix="net"))
    detector.init_cfg = dict(type="Constant", layer=["Conv2d", "Linear"], val=3.0)
    detector.init_weights()
    assert same(detector.backbone.state_dict(), without(trained, "layer4."))
    assert detector.head.weight.eq(3).all()


@pytest.mark.parametrize("attention", [None, "MRLALight"])
def test_pvtv2_files_of_the_authors(attention, tmp_path):
    authors = pvtv2_state()
    path = save(tmp_path, authors | {"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)})
    report = load_weights(model := MRLAPVTv2("b0", attention), path)
    assert report.keys[KeyStatus.OUTSIDE] == ["head.fc.weight", "head.fc.bias"]
    assert len(report.keys[KeyStatus.NEW_ATTENTION]) == (8 * 8 if attention else 0)
    other = MRLAPVTv2("b0", attention)
    assert all(".mrla." in key for key in other.load_state_dict(authors, strict=False).missing_keys)
    for state in (model.state_dict(), other.state_dict()):
        qkv = state["layers.2.1.1.attn.attn.in_proj_weight"]
        parts = [authors[f"block3.1.attn.{name}.weight"] for name in ("q", "kv")]
        assert torch.equal(qkv, torch.cat(parts))
        patches = authors["patch_embed1.proj.weight"]
        assert torch.equal(state["layers.0.0.projection.weight"], patches)
    with pytest.raises(InputError, match="another shape"):
        load_weights(MRLAPVTv2("b1", attention), path)
    converted, _, left_out = convert(path, model, folder=tmp_path)
    converted = read_checkpoint(converted)["state_dict"]
    assert converted["head.fc.weight"].eq(1).all() and not left_out
    assert not any(".mrla." in key for key in converted)


def pvtv2_state():
    layers = {}
    before, kernel = 3, 7
    stages = [(32, 8, 8), (64, 4, 8), (160, 2, 4), (256, 1, 4)]
    for stage, (dim, reduction, ratio) in enumerate(stages, start=1):
        layers[f"patch_embed{stage}.proj"] = (dim, before, kernel, kernel)
        layers[f"patch_embed{stage}.norm"] = layers[f"norm{stage}"] = (dim,)
        block = {"attn.q": (dim, dim), "attn.kv": (2 * dim, dim), "attn.proj": (dim, dim)}
        block |= {"mlp.fc1": (ratio * dim, dim), "mlp.fc2": (dim, ratio * dim)}
        block |= {"mlp.dwconv.dwconv": (ratio * dim, 1, 3, 3), "norm1": (dim,), "norm2": (dim,)}
        if reduction > 1:
            block |= {"attn.sr": (dim, dim, reduction, reduction), "attn.norm": (dim,)}
        layers |= prefixed(block, f"block{stage}.0.") | prefixed(block, f"block{stage}.1.")
        before, kernel = dim, 3
    return random_layers(layers)
