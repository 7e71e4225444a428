"""Whole checkpoints: tests and resumed runs take their own only, a fine-tuning at least a backbone that matches."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

from mrla_mm.backbones import MRLAResNet
from mrla_mm.errors import InputError

from .conftest import LIGHT, prefixed, released_resnet, without
from .conftest import save as save_file

THREE_STAGES = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))


class Detector(BaseModel):
    """A backbone and a head with some number of classes."""

    def __init__(self, classes=2, depth=18, attention=LIGHT):
        super().__init__()
        self.backbone = MRLAResNet(depth, attention, base_channels=16, **THREE_STAGES)
        self.head = nn.Linear(64, classes)

    def forward(self, *images, mode):
        scores = self.head(self.backbone(torch.stack(images))[-1].mean((2, 3)))
        return dict(loss=scores.square().mean()) if mode == "loss" else scores


def runner(tmp_path, model, **more):
    loader = dict(dataset=[torch.rand(3, 32, 32)] * 2, batch_size=2, num_workers=0)
    loader["sampler"] = dict(type="DefaultSampler", shuffle=False)
    options = dict(
        test_dataloader=loader, test_cfg=dict(), test_evaluator=[], default_scope="mmengine"
    )
    options |= dict(
        train_dataloader=copy.deepcopy(loader), train_cfg=dict(by_epoch=True, max_epochs=2)
    )
    options |= dict(
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)), default_hooks=dict(checkpoint=None)
    )
    options |= dict(
        custom_hooks=[dict(type="CheckpointCheckHook")],
        experiment_name=f"{tmp_path.name}{id(model)}",
    )
    return Runner(model=model, work_dir=str(tmp_path), **options, **more)


def save(tmp_path, state, **meta):
    return str(save_file(tmp_path, {"state_dict": state, "meta": meta}))


@pytest.mark.parametrize(
    ("model", "file", "reason"),
    [
        ({}, dict(depth=34), "another depth"),
        (dict(depth=34), {}, "nothing was loaded"),
        ({}, dict(classes=3), "backbone matches"),
        ({}, dict(attention=dict(LIGHT, previous="none")), "mrla"),
    ],
)
def test_testing_takes_the_models_own_checkpoint_only(tmp_path, model, file, reason):
    """A deeper model's has all that the model needs, and more."""
    runner(
        tmp_path, Detector(**file), load_from=save(tmp_path, Detector(**file).state_dict())
    ).test()
    with pytest.raises(InputError, match=reason):
        runner(tmp_path, Detector(**model), load_from=str(tmp_path / "w.pth")).test()


def test_testing_needs_trained_layer_attention_of_the_same_heads(tmp_path):
    """Heads of another width have the same shapes; the config in the checkpoint tells."""
    state = Detector().state_dict()
    with pytest.raises(InputError, match="mrla"):
        runner(tmp_path, Detector(), load_from=save(tmp_path, without(state, ".mrla."))).test()
    cfg = "model = dict(backbone=dict(layer_attention=dict(type='MRLALight', head_channels=8)))"
    with pytest.raises(InputError, match="head_channels=8"):
        runner(tmp_path, Detector(), load_from=save(tmp_path, state, cfg=cfg)).test()


def test_a_training_starts_from_any_backbone_that_matches(tmp_path):
    """With other heads, from plain weights, and from the authors'; never from another backbone."""
    released = prefixed(without(released_resnet("light"), "layer4", "fc."), "backbone.")
    for state in (
        Detector(classes=5).state_dict(),
        without(Detector().state_dict(), ".mrla."),
        released,
    ):
        built = runner(tmp_path, Detector(), load_from=save(tmp_path, state))
        built.train()
        assert built.epoch == 2
    scale = built.model.backbone.layer1[0].mrla.attention.history_scale
    torch.testing.assert_close(
        scale, released["backbone.layer1.0.mrla.lambda_t"].flatten(), atol=0.1, rtol=0
    )
    for state in (Detector(depth=34).state_dict(), nn.Linear(2, 2).state_dict()):
        with pytest.raises(InputError):
            runner(tmp_path, Detector(), load_from=save(tmp_path, state)).train()


def test_resuming_takes_the_runs_own_checkpoint_only(tmp_path):
    path = save(tmp_path, Detector(classes=5).state_dict(), epoch=1, iter=1)
    with pytest.raises(InputError, match="head.weight"):
        runner(tmp_path, Detector(), load_from=path, resume=True).train()


@pytest.mark.parametrize(("loaded", "norm_eval"), [(False, True), (True, True), (False, False)])
def test_frozen_random_layers_are_a_warning(tmp_path, loaded, norm_eval):
    """mmdet's defaults keep batch statistics as they are, which without pretrained weights are zero and one."""
    detector = Detector()
    detector.backbone.norm_eval = norm_eval
    path = save(tmp_path, Detector().state_dict()) if loaded else None
    runner(tmp_path, detector, load_from=path).train()
    (log,) = tmp_path.glob("*/*.log")
    assert ("RANDOM WEIGHTS" in log.read_text()) == (norm_eval and not loaded)
