"""Pretrained weights of MRLA backbones: every accepted form loads entirely, everything else stops with an error."""

import copy

import pytest
import torch
import torchvision
from mmdet.models import ResNet
from mmengine.model.weight_init import PretrainedInit
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention import LayerAttentionResidual, MRLALight
from mrla_mm.backbones import MRLAResNet, MRLAViT
from mrla_mm.errors import InputError
from mrla_mm.weights import initializer, load_weights, publishing
from mrla_mm.weights.provenance import compare_attention

from .conftest import narrow, plain_resnet, released_resnet, scatter, torchvision_resnet

LIGHT, BASE = dict(type="MRLALight", head_channels=16), dict(type="MRLABase", head_channels=16)


def backbone(checkpoint, *, depth=18, kind=None, **more):
    """Build a backbone and initialise it as a run does."""
    init_cfg = dict(type=kind or "Pretrained", checkpoint=str(checkpoint), **more.pop("options", {}))
    more.setdefault("layer_attention", LIGHT)
    built = MODELS.build(dict(type="MRLAResNet", depth=depth, base_channels=16, init_cfg=init_cfg, **more))
    built.init_weights()
    return built


def message(*args, **kwargs):
    with pytest.raises(InputError) as caught:
        backbone(*args, **kwargs)
    return str(caught.value)


def save(tmp_path, content, name="w.pth"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def same(state, expected):
    assert state.keys() == expected.keys()
    return all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def trained():
    """The state dict of a trained backbone: all values differ from fresh ones."""
    return scatter(narrow(18, LIGHT)).state_dict()


def prefixed(state, prefix):
    return {f"{prefix}{key}": value for key, value in state.items()}


OTHER = {key: torch.zeros(2) for key in ("head.fc.weight", "neck.convs.0.weight", "roi_head.bbox_head.fc_cls.bias")}
FORMS = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "meta": {}},
    "model": lambda s: {"model": s, "epoch": 3},
    "classifier": lambda s: {"state_dict": {**prefixed(s, "backbone."), "head.fc.weight": torch.zeros(2, 2)}},
    "detector": lambda s: {"meta": {}, "state_dict": {**OTHER, **prefixed(s, "backbone.")}, "optimizer": {}},
    "ddp": lambda s: prefixed(s, "module."),
    "ddp-classifier": lambda s: {
        "state_dict": prefixed(s, "module.backbone.") | {"module.head.fc.bias": torch.ones(1)}
    },
    "compiled": lambda s: prefixed(s, "_orig_mod."),
    "mmengine-ema": lambda s: {
        "ema_state_dict": {**prefixed(s, "module.backbone."), "steps": torch.tensor(4)},
    },
    "timm-ema": lambda s: {"state_dict_ema": prefixed(s, "module.")},
    "deit-ema": lambda s: {"model_ema": s},
    "nested": lambda s: {"model": {"state_dict": s}},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_accepted_forms(form, trained, tmp_path):
    loaded = backbone(save(tmp_path, form(trained)))
    assert same(loaded.state_dict(), trained)


def test_half_precision_weights(trained, tmp_path):
    half = {key: value.half() if value.is_floating_point() else value for key, value in trained.items()}
    loaded = backbone(save(tmp_path, half)).state_dict()
    assert all(value.dtype == trained[key].dtype for key, value in loaded.items())
    assert torch.equal(loaded["conv1.weight"], trained["conv1.weight"].half().float())


def test_the_model_is_preferred_to_its_average_unless_asked(trained, tmp_path):
    average = {key: value + 1 for key, value in trained.items()}
    path = save(tmp_path, {"model": trained, "model_ema": average})
    assert same(backbone(path).state_dict(), trained)
    assert same(backbone(path, options=dict(entry="model_ema")).state_dict(), average)
    assert "there is no entry 'ema'" in message(path, options=dict(entry="ema"))
    assert "not model_ema" in load_weights(narrow(18, LIGHT), path).origin


def test_explicit_prefix(trained, tmp_path):
    """A prefix chooses among several models in a file; without it, or with a wrong one, nothing is guessed."""
    teacher = {key: value + 1 for key, value in trained.items()}
    path = save(tmp_path, {**prefixed(trained, "student.net."), **prefixed(teacher, "teacher.net.")})
    assert same(backbone(path, options=dict(prefix="student.net")).state_dict(), trained)
    said = message(path)
    assert "do not fit MRLAResNet, nothing was loaded" in said and "its first key is student.net.conv1.wei" in said
    assert "no weights found below prefix='nobody.'" in message(path, options=dict(prefix="nobody"))


def test_no_weights_at_all(tmp_path):
    assert "there is no tensor among meta, epoch" in message(save(tmp_path, {"meta": {}, "epoch": 1}))


@pytest.mark.parametrize(("variant", "attention"), [("light", LIGHT), ("base", BASE)])
def test_files_of_the_authors(variant, attention, tmp_path):
    """The release's names land where they belong, every tensor of the file is used, none of the model is left."""
    released = released_resnet(variant)
    report = load_weights(model := narrow(18, attention), save(tmp_path, {"state_dict": prefixed(released, "module.")}))
    state = model.state_dict()
    assert len(report.matched) == len(state) == len(released) - 2
    assert not (report.missing or report.fresh or report.additional or report.unexpected or report.unused)
    assert report.heads == ["head.fc.weight", "head.fc.bias"]
    stage = "layer3" if variant == "light" else "stages.2"
    names = {
        "mrla.attention.query.weight": "mrla.mrla.Wq.weight",
        "mrla.attention.key.weight": "mrla.mrla.Wk.weight",
        "mrla.attention.value.weight": "mrla.mrla.Wv.weight",
        "mrla.norm.weight": "bn_mrla.weight",
        "mrla.norm.bias": "bn_mrla.bias",
        "mrla.norm.running_mean": "bn_mrla.running_mean",
        "mrla.norm.running_var": "bn_mrla.running_var",
        "conv2.weight": "conv2.weight",
        "bn1.running_var": "bn1.running_var",
    }
    for ours, theirs in names.items():
        assert torch.equal(state[f"layer3.1.{ours}"], released[f"{stage}.1.{theirs}"]), ours
    assert torch.equal(state["layer3.0.downsample.0.weight"], released[f"{stage}.0.downsample.0.weight"])
    if variant == "light":
        scale = state["layer3.1.mrla.attention.history_scale"]
        assert torch.equal(scale, released["layer3.1.mrla.lambda_t"].flatten())


@pytest.mark.parametrize("heads", [8, 16])
def test_width_of_heads_in_the_authors_base_files(heads, tmp_path):
    """Shapes do not tell the width, and the published code has another than the paper: the report says so."""
    model = narrow(18, dict(type="MRLABase", head_channels=heads))
    report = load_weights(model, save(tmp_path, released_resnet("base")))
    assert ("head_channels=16 unless" in report.table()) == (heads == 8)


def test_torchvision_resnet50_starts_as_a_plain_resnet50(tmp_path):
    """Warm start: everything but layer attention loads, and the outputs are those of torchvision's own ResNet-50."""
    plain = torchvision_resnet(50)
    path = save(tmp_path, plain.state_dict())
    report = load_weights(model := MRLAResNet(50, dict(type="MRLALight"), init_cfg=None).eval(), path)
    assert len(report.matched) == len(plain.state_dict()) - 2 and not report.missing
    assert all(".mrla." in key for key in report.fresh) and len(report.fresh) == 16 * 9
    assert "starts as an exact identity" in report.table()
    image = torch.randn(2, 3, 65, 97)
    levels = {}
    for name in ("layer1", "layer2", "layer3", "layer4"):
        getattr(plain, name).register_forward_hook(lambda m, args, out, name=name: levels.setdefault(name, out))
    with torch.no_grad():
        plain(image)
        outputs = model(image)
    for expected, actual in zip(levels.values(), outputs, strict=True):
        assert actual.std() > 0
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_report_says_when_a_warm_start_is_no_identity(tmp_path):
    path = save(tmp_path, plain_resnet())
    report = load_weights(narrow(18, LIGHT, zero_init_attention=False), path)
    assert "starts from random weights" in report.table()


def drop(*keys):
    return lambda state: {key: value for key, value in state.items() if not key.startswith(keys)}


WRONG = {
    "deeper": (lambda s: released_resnet("light", 34), "layer1.2.conv1.weight"),
    "wider": (lambda s: plain_resnet(50), "(16, 16, 1, 1) in the file, (16, 16, 3, 3) in the model"),
    "other": (
        lambda s: torchvision.models.squeezenet1_1().state_dict(),
        "another kind of model: its first key is features.0.weight",
    ),
    "part-of-attention": (drop("layer2.0.mrla.attention.query"), "1 keys of the model are not in the file: layer2.0"),
    "no-norm": (drop("layer1.0.bn2.running_var"), "layer1.0.bn2.running_var"),
    "base": (lambda s: released_resnet("base"), "attention.history_scale"),
}


@pytest.mark.parametrize(("make", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_architecture_loads_nothing(make, expected, trained, tmp_path):
    path = save(tmp_path, make(trained))
    model = narrow(18, LIGHT, init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError) as caught:
        load_weights(model, path)
    said = str(caught.value)
    assert expected in said and f"of the model's {len(before)} tensors match; " in said and "nothing was loaded" in said
    assert same(model.state_dict(), before)
    with pytest.raises(InputError):
        model.init_weights()


def test_the_depth_is_named_before_the_attention_that_plain_files_may_lack(tmp_path):
    with pytest.raises(InputError, match="Probably it is of another depth"):
        load_weights(narrow(34, LIGHT), save(tmp_path, plain_resnet(18)))


def test_light_weights_do_not_fit_base(tmp_path):
    said = message(save(tmp_path, released_resnet("light")), layer_attention=BASE)
    assert "keys of the file are not in the model: layer1.0.mrla.attention.history_scale" in said


def test_what_matches_by_explicit_request_only(trained, tmp_path):
    path = save(tmp_path, drop("layer4.")(trained))
    assert "set strict=False beside the checkpoint" in message(path)
    loaded = backbone(path, options=dict(strict=False)).state_dict()
    assert torch.equal(loaded["layer3.0.conv1.weight"], trained["layer3.0.conv1.weight"])
    other = save(tmp_path, torchvision.models.squeezenet1_1().state_dict(), "other.pth")
    assert ": 0 of the model's" in message(other, options=dict(strict=False)), "nothing at all is never what was wanted"


def test_parts_the_model_lacks_are_dropped_and_named(trained, tmp_path):
    """A backbone of three stages takes a file of four, as detectors on the third stage do."""
    three = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))
    report = load_weights(narrow(18, LIGHT, **three), save(tmp_path, trained))
    assert "no such part" in report.table() and "layer4 (" in report.table()


def test_added_parts_may_be_missing(trained, tmp_path):
    """Plugins of mmdet come with no published file, and counters of batches are younger than some files."""
    plugins = [dict(cfg=dict(type="ContextBlock", ratio=1 / 4), position="after_conv3")]
    plain = plain_resnet(50)
    old = {key: value for key, value in plain.items() if not key.endswith("num_batches_tracked")}
    report = load_weights(narrow(50, LIGHT, plugins=plugins), save(tmp_path, old))
    assert any("context_block" in key for key in report.additional) and not report.faults()


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (dict(type="MRLALight", head_channels=8), "head_channels=8, the model has 16"),
        (dict(type="MRLALight", head_channels=16, previous="output"), "previous='output', the model has 'shortcut'"),
        (dict(type="MRLALight", head_channels=16, value="dwconv_gelu"), "value='dwconv_gelu', the model has 'dwconv'"),
        (dict(type="MRLALight"), "head_channels=32, the model has 16"),
        (dict(type="MRLALight", head_channels=16, previous="shortcut", value="dwconv"), None),
        (dict(type="MRLALight", head_channels=16), None),
        (dict(type="mrla_mm.attention.light.MRLALight", head_channels=16), None),
        (dict(type="mrla_mm.attention.base.MRLABase"), "type='MRLABase', the model has 'MRLALight'"),
    ],
)
def test_trained_with_another_attention_of_the_same_shapes(file, expected, published, trained, tmp_path):
    """What shapes cannot tell, metadata can: of published files and, without running it, of a training's config."""
    pairs = ", ".join(f"{key}={value!r}" for key, value in file.items())
    text = f"model = dict(backbone=dict(layer_attention=dict({pairs})))\nraise SystemExit\n"
    meta = dict(layer_attention=file) if published else dict(cfg=text)
    path = save(tmp_path, {"state_dict": trained, "meta": meta})
    if expected is None:
        backbone(path, layer_attention=LIGHT)
    else:
        assert f"trained with layer_attention {expected}" in message(path, layer_attention=LIGHT)
        backbone(path, layer_attention=LIGHT, options=dict(strict=False))


@pytest.mark.parametrize(
    ("of_file", "of_model", "expected"),
    [
        (dict(head_channels=16), {}, None),
        ({}, dict(head_channels=16, value="dwconv_gelu"), None),
        (dict(head_channels=32), {}, "head_channels=32, the model has 16"),
        ({}, dict(value="dwconv"), "value='dwconv_gelu', the model has 'dwconv'"),
    ],
)
def test_defaults_that_are_compared_are_those_of_the_backbone(of_file, of_model, expected):
    """On tokens heads have 16 channels and light a GELU, where nothing is said."""
    arch = dict(embed_dims=32, num_layers=1, num_heads=2, feedforward_channels=32)
    model = MRLAViT(arch, dict(type="MRLALight", **of_model), out_type="featmap")
    found = compare_attention(model, dict(type="MRLALight", **of_file))
    assert len(found) == (expected is not None) and all(expected in words for words in found)


def test_a_class_is_compared_and_published_by_its_name():
    attention = dict(type=MRLALight, head_channels=16)
    assert publishing.plain(attention) == dict(type="MRLALight", head_channels=16)
    model = narrow(18, attention)
    assert not compare_attention(model, publishing.plain(attention))
    assert compare_attention(model, dict(attention, type="MLA"))


@pytest.mark.parametrize(
    "kind",
    [
        "Pretrained",
        PretrainedInit,
        "mmengine.Pretrained",
        "mmengine.model.weight_init.PretrainedInit",
        initializer.StrictPretrained,
    ],
)
def test_configs_that_name_the_class_are_strict_too(kind, trained, tmp_path):
    """All that is loaded stays: mmengine initialises the parts of a module after what it does not call Pretrained."""
    assert same(backbone(save(tmp_path, prefixed(trained, "backbone.")), kind=kind).state_dict(), trained)
    assert "nothing was loaded" in message(save(tmp_path, drop("layer4.")(trained)), kind=kind)


def test_the_report_is_logged_once(trained, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(initializer, "print_log", lambda message, logger: logged.append((message, logger)))
    backbone(save(tmp_path, {"state_dict": {**OTHER, **prefixed(trained, "backbone.")}}))
    ((table, logger),) = logged
    assert logger == "current" and table.startswith("MRLAResNet loads ")
    rows = {line[2:26].strip(): line[26:].strip() for line in table.splitlines()[1:]}
    assert rows["matched"] == str(len(trained)) and rows["missing"] == rows["unexpected"] == "0"
    assert rows["dropped: heads"] == "3  head (1), neck (1), roi_head (1)"


def test_subclasses_are_strict(trained, tmp_path):
    class Mine(MRLAResNet):
        pass

    path = save(tmp_path, drop("layer4.")(trained))
    with pytest.raises(InputError):
        Mine(18, LIGHT, base_channels=16, init_cfg=dict(type="Pretrained", checkpoint=str(path))).init_weights()


def test_backbones_of_other_packages_load_as_before(tmp_path):
    """mmdet's ResNet keeps mmengine's lenience and its prefix; loading nothing, and idle options, are errors."""
    state = plain_resnet()
    path = save(tmp_path, {"state_dict": prefixed(drop("layer4.")(state), "backbone.")})
    init_cfg = dict(type="Pretrained", checkpoint=str(path), prefix="backbone.")
    plain = ResNet(18, base_channels=16, init_cfg=init_cfg)
    plain.init_weights()
    assert torch.equal(plain.state_dict()["layer3.0.conv1.weight"], state["layer3.0.conv1.weight"])
    del init_cfg["prefix"]
    with pytest.raises(InputError, match="have nothing for ResNet.*those of the file backbone.conv1.weight.*prefix="):
        ResNet(18, init_cfg=init_cfg).init_weights()
    with pytest.raises(InputError, match="strict and entry are for mrla_mm's backbones"):
        ResNet(18, init_cfg=dict(init_cfg, strict=False)).init_weights()


def test_layer_attention_of_a_fresh_warm_start_learns(tmp_path):
    """The identity start has gradients: the norm's weight leaves zero, so the branch is not dead."""
    model = backbone(save(tmp_path, plain_resnet())).train()
    sum((level**2).mean() for level in model(torch.randn(2, 3, 64, 64))).backward()
    scales = [m.norm.weight for m in model.modules() if isinstance(m, LayerAttentionResidual)]
    assert all(isinstance(scale, nn.Parameter) and scale.grad.abs().sum() > 0 for scale in scales)
