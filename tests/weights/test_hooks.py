"""Whole checkpoints: what tests, resumed runs and trainings take, and what they say of the rest."""

from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from mmdet.models import DetTTAModel, SemiBaseDetector
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import load_checkpoint
from torch import nn

from mrla_mm.attention import MRLABase
from mrla_mm.backbones import MRLAResNet
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

from ..engine.runs import build
from .conftest import BASE, LIGHT, narrow, prefixed, released_resnet, same, scatter, without
from .conftest import save as save_file
from .test_other_families import build as vit

PLUGINS = [dict(cfg=dict(type="mrla_mm.ECA"), position="after_conv3")]
THREE_STAGES = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))


class Detector(BaseModel):
    def __init__(self, classes=2, depth=18, attention=LIGHT, **more):
        super().__init__()
        self.backbone = MRLAResNet(depth, attention, base_channels=16, **THREE_STAGES, **more)
        self.head = nn.Linear(self.backbone.feat_dim, classes)

    def forward(self, *images, mode):
        scores = self.head(self.backbone(torch.stack(images))[-1].mean((2, 3)))
        return dict(loss=scores.square().mean()) if mode == "loss" else scores


def runner(tmp_path, model, hooks=(), epochs=2, **more):
    loop = dict(by_epoch=True, max_epochs=epochs)
    hooks = [dict(type="CheckpointCheckHook"), *hooks]
    return build(tmp_path, model=model, shape=(3, 32, 32), loop=loop, hooks=hooks, **more)


def save(tmp_path, state, **meta):
    return str(save_file(tmp_path, {"state_dict": state, "meta": meta}))


@pytest.mark.parametrize(
    ("model", "file", "reason"),
    [
        ({}, dict(depth=34), "another depth"),
        (dict(depth=34), {}, "nothing was loaded"),
        ({}, dict(classes=3), "backbone matches"),
        (dict(depth=50, plugins=PLUGINS), dict(depth=50), "not in the file"),
    ],
)
def test_tests_and_resumed_runs_take_the_models_own_checkpoint_only(tmp_path, model, file, reason):
    path = save(tmp_path, Detector(**file).state_dict(), epoch=1, iter=1)
    runner(tmp_path, DetTTAModel(module=Detector(**file))).load_checkpoint(path)
    with pytest.raises(InputError, match=reason):
        runner(tmp_path, Detector(**model), load_from=path).test()
    with pytest.raises(InputError, match=reason):
        runner(tmp_path, Detector(**model), load_from=path, resume=True).train()


def spread(history):
    return max(history.data[0]) - min(history.data[0])


def test_a_run_with_a_statistic_of_a_projects_own_resumes_and_is_tested(tmp_path, monkeypatch):
    monkeypatch.setitem(HistoryBuffer._statistics_methods, "spread", spread)
    runner(tmp_path, Detector()).train()
    resumed = runner(tmp_path, Detector(), resume=True, epochs=3)
    resumed.train()
    assert resumed.message_hub.get_scalar("train/loss").statistics("spread") >= 0
    runner(tmp_path, Detector(), load_from=str(tmp_path / "epoch_3.pth")).test()


def test_the_checkpoints_of_a_run_know_their_layer_attention(tmp_path):
    runner(tmp_path, Detector(), [dict(type="EMAHook")]).train()
    path = str(tmp_path / "epoch_2.pth")
    runner(tmp_path, Detector(), load_from=path).test()
    other = Detector(attention=dict(LIGHT, head_channels=8))
    for load in (
        runner(tmp_path, other, load_from=path).test,
        runner(tmp_path, other, load_from=path).train,
        runner(tmp_path, other, load_from=path, resume=True).train,
        lambda: load_weights(other.backbone, path, entry="ema_state_dict"),
    ):
        with pytest.raises(InputError, match="head_channels=16, the model has 8"):
            load()


@pytest.mark.parametrize("name", ["gone.pth", "w.safetensors"])
def test_files_that_mmengine_could_not_load(name, tmp_path):
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(InputError, match=name):
        runner(tmp_path, Detector(), load_from=str(tmp_path / name)).test()


def test_a_training_starts_from_any_backbone_that_matches(served, cache, tmp_path):
    folder, address = served
    released = prefixed(without(released_resnet("light"), "layer4", "fc."), "backbone.")
    plain = without(Detector().state_dict(), ".mrla.")
    for state in (Detector(classes=5).state_dict(), plain, released):
        built = runner(tmp_path, Detector(), load_from=save(tmp_path, state))
        built.train()
        assert built.epoch == 2
    scale = built.model.backbone.layer1[0].mrla.attention.history_scale
    expected = released["backbone.layer1.0.mrla.lambda_t"].flatten()
    torch.testing.assert_close(scale, expected, atol=0.1, rtol=0)
    save(folder, plain)
    runner(tmp_path, Detector(), load_from=f"{address}/w.pth").train()
    assert len(list(cache.iterdir())) == 1, "the file that was checked is the one that loads"
    deeper = save(tmp_path, Detector(depth=34).state_dict())
    with pytest.raises(InputError):
        runner(tmp_path, Detector(), load_from=deeper).train()


ENTRIES = {
    "average": lambda state: dict(model_ema=state, epoch=3),
    "compiled": lambda state: dict(state_dict=prefixed(state, "_orig_mod.")),
    "nested": lambda state: dict(state_dict=dict(state_dict=state)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_compared_is_what_loads(entry, tmp_path):
    state = scatter(Detector()).state_dict()
    scales = {key: state[key].view(-1, 1, 1) for key in state if key.endswith("history_scale")}
    path = str(save_file(tmp_path, ENTRIES[entry](state | scales)))
    average = dict(type="EMAHook", priority=49)  # RTMDet's, before other hooks
    built = runner(tmp_path, Detector(), [average], load_from=path)
    built.test()
    ema = next(hook.ema_model for hook in built.hooks if hasattr(hook, "ema_model"))
    assert same(built.model.state_dict(), state) and same(ema.module.state_dict(), state)


def test_a_supervised_detector_starts_teacher_and_student(tmp_path):
    state = Detector().state_dict()
    semi = SemiBaseDetector(ConfigDict(type=Detector), semi_train_cfg={})
    runner(tmp_path, semi, load_from=save(tmp_path, state)).load_or_resume()
    assert same(semi.teacher.state_dict(), state) and same(semi.student.state_dict(), state)
    others = Detector(depth=34), Detector(attention=dict(LIGHT, head_channels=8))
    for other, words in zip(others, ("backbone.layer1.2", "student.*=8, .*has 16"), strict=True):
        with pytest.raises(InputError, match=words):
            runner(tmp_path, semi, load_from=save(tmp_path, other.state_dict())).train()


def test_classes_in_another_order_than_trained_are_refused(tmp_path):
    named = type("Named", (list,), dict(metainfo=dict(classes=("a", "b"))))
    for trained in ("ac", "ab", "ba"):
        path = save(tmp_path, Detector().state_dict(), dataset_meta=dict(classes=[*trained]))
        built = runner(tmp_path, Detector(), load_from=path)
        built._test_dataloader["dataset"] = named(torch.rand(2, 3, 32, 32))
        with pytest.raises(InputError, match="'b', 'a'") if trained == "ba" else nullcontext():
            built.test()


def warnings_of(folder):
    (log,) = folder.glob("*/*.log")
    return "".join(line for line in log.read_text().splitlines() if " WARNING " in line)


@pytest.mark.parametrize(("loaded", "norm_eval"), [(False, True), (True, True), (False, False)])
def test_frozen_random_layers_are_a_warning(tmp_path, loaded, norm_eval):
    path = save(tmp_path, Detector().state_dict()) if loaded else None
    runner(tmp_path, Detector(norm_eval=norm_eval), load_from=path).train()
    assert ("RANDOM WEIGHTS" in warnings_of(tmp_path)) == (norm_eval and not loaded)


@pytest.mark.parametrize("zero_init", [True, False])
@pytest.mark.parametrize("by_hook", [True, False], ids=["load_from", "init_cfg"])
def test_plain_weights_below_random_attention_are_a_warning(by_hook, zero_init, tmp_path):
    path = save(tmp_path, without(Detector().state_dict(), ".mrla."))
    init_cfg = None if by_hook else dict(type="Pretrained", checkpoint=path)
    detector = Detector(zero_init_attention=zero_init, init_cfg=init_cfg)
    runner(tmp_path, detector, load_from=path if by_hook else None).train()
    assert ("zero_init_attention=True" in warnings_of(tmp_path)) == (not zero_init)


FIXED = dict(LIGHT, learnable_lambda=False)
CHANGES = {
    "heads": (LIGHT, dict(LIGHT, head_channels=8), "head_channels=16, the model has 8"),
    "gelu": (LIGHT, dict(LIGHT, value="dwconv_gelu"), "value_gelu=False, the model has True"),
    "previous": (FIXED, dict(FIXED, previous="output"), "previous='shortcut'"),
}


@pytest.mark.parametrize(("trained", "other", "expected"), CHANGES.values(), ids=CHANGES)
def test_every_loader_tells(trained, other, expected, tmp_path):
    state = narrow(18, trained).state_dict()
    path = str(save_file(tmp_path, {"state_dict": state}))
    model = narrow(18, other)
    before = OrderedDict(model.state_dict())
    with pytest.raises(InputError, match=expected):
        load_weights(model, path)
    assert same(model.state_dict(), before)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=expected):
            model.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError, match=expected):
        load_checkpoint(model, path, strict=True)
    assert expected in load_weights(model, path, strict=False).table()


class Mine(MRLABase):
    """Computes what its parent computes."""


@pytest.mark.parametrize(("trained", "other"), [("MRLABase", Mine), (Mine, "MRLABase")])
def test_a_subclass_and_its_parent_load_each_others_weights(trained, other, tmp_path):
    state = scatter(narrow(18, dict(BASE, type=trained))).state_dict()
    path = save_file(tmp_path, {"state_dict": state})
    load_weights(loaded := narrow(18, dict(BASE, type=other)), path)
    assert same(loaded.state_dict(), state)
    with pytest.raises(InputError, match="type='MRLABase', the model has 'MLA'"):
        load_weights(narrow(18, dict(BASE, type="MLA")), path)


@torch.no_grad()
def test_stages_of_other_blocks():
    """With the shortcut as history, no block asks where its stage starts."""
    with pytest.raises(RuntimeError, match="layers.2.mrla.attention: .*first_in_stage=True"):
        vit(BASE, stage_blocks=4).load_state_dict(vit(BASE).state_dict())
    model, other = vit().eval(), vit(stage_blocks=4).eval()
    other.load_state_dict(model.state_dict())
    image = torch.rand(1, 3, 64, 64)
    assert torch.equal(model(image)[0], other(image)[0])
