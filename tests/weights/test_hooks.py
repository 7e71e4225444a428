"""Whole checkpoints: tests and resumed runs take their own only, a fine-tuning at least a backbone that matches."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from mrla_mm.backbones import MRLAResNet, ViT
from mrla_mm.errors import InputError

from .conftest import plain_resnet

LIGHT = dict(type="MRLALight", head_channels=16)
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


class NoMetric:
    """Evaluates nothing."""

    dataset_meta = None

    def process(self, **kwargs):
        """Take a batch."""

    def evaluate(self, size):
        """Return no figure."""
        return {}


def runner(tmp_path, model, **more):
    loader = dict(dataset=[torch.rand(3, 32, 32)] * 2, batch_size=2, num_workers=0)
    loader["sampler"] = dict(type="DefaultSampler", shuffle=False)
    built = Runner(
        model=model,
        work_dir=str(tmp_path),
        train_dataloader=copy.deepcopy(loader),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
        test_dataloader=loader,
        test_cfg=dict(),
        test_evaluator=[],
        custom_hooks=[dict(type="CheckpointCheckHook")],
        default_hooks=dict(checkpoint=None),
        experiment_name=f"{tmp_path.name}{id(model)}",
        default_scope="mmengine",
        **more,
    )
    built._test_evaluator = NoMetric()
    return built


def save(tmp_path, state, meta=None):
    torch.save({"state_dict": state, "meta": meta or {}}, tmp_path / "w.pth")
    return str(tmp_path / "w.pth")


def message(run):
    with pytest.raises(InputError) as caught:
        run()
    return str(caught.value)


def test_testing_takes_the_models_own_checkpoint_only(tmp_path):
    path = save(tmp_path, Detector().state_dict())
    runner(tmp_path, Detector(), load_from=path).test()
    for other in (Detector(classes=3), Detector(depth=34)):
        said = message(runner(tmp_path, other, load_from=path).test)
        assert said.startswith("checkpoint: ") and "do not fit Detector, nothing was loaded" in said
    plain = {f"backbone.{key}": value for key, value in plain_resnet().items()}
    assert ".mrla." in message(runner(tmp_path, Detector(), load_from=save(tmp_path, plain)).test)


def test_a_deeper_models_checkpoint_is_not_tested(tmp_path):
    """It has all that the model needs, and more: the one fault that leaves no key missing."""
    path = save(tmp_path, Detector(depth=34).state_dict())
    assert "keys of the file are not in the model" in message(runner(tmp_path, Detector(), load_from=path).test)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(depth=34), "Probably it is of another depth"),
        (dict(classes=3), "The backbone matches: probably the heads"),
        (dict(attention=dict(type="MRLALight", head_channels=16, previous="none")), "Only layer attention differs"),
    ],
)
def test_the_message_is_short_and_says_what_the_file_probably_is(tmp_path, other, reason):
    said = message(runner(tmp_path, Detector(), load_from=save(tmp_path, Detector(**other).state_dict())).test)
    assert reason in said and " tensors match; " in said
    assert len(said.replace(str(tmp_path), "")) < 700


def test_a_classifier_is_told_where_it_belongs(tmp_path):
    state = {key: value for key, value in Detector().state_dict().items() if key.startswith("backbone.")}
    path = save(tmp_path, state | {"head.fc.weight": torch.zeros(3, 8), "head.fc.bias": torch.zeros(3)})
    assert "It is a classifier: its backbone is for model.backbone.init_cfg.checkpoint" in message(
        runner(tmp_path, Detector(), load_from=path).test
    )


def test_fine_tuning_may_change_the_head(tmp_path):
    trained = Detector(classes=5)
    path = save(tmp_path, trained.state_dict())
    built = runner(tmp_path, Detector(), load_from=path)
    built.train()
    assert built.iter == 2 or built.epoch == 2


def test_fine_tuning_from_another_backbone_is_refused(tmp_path):
    for state in (Detector(depth=34).state_dict(), nn.Linear(2, 2).state_dict()):
        built = runner(tmp_path, Detector(), load_from=save(tmp_path, state))
        assert message(built.train).startswith("load_from: ")


def test_plain_weights_start_a_detector_with_layer_attention(tmp_path):
    state = Detector().state_dict()
    plain = {key: value for key, value in state.items() if ".mrla." not in key}
    runner(tmp_path, Detector(), load_from=save(tmp_path, plain)).train()


def test_resuming_takes_the_runs_own_checkpoint_only(tmp_path):
    path = save(tmp_path, Detector(classes=5).state_dict(), dict(epoch=1, iter=1))
    said = message(runner(tmp_path, Detector(), load_from=path, resume=True).train)
    assert said.startswith("--resume: ") and "head.weight (5, 64) in the file" in said


def test_hook_is_registered_at_the_root():
    assert HOOKS.get("CheckpointCheckHook") is not None


def test_positions_of_another_grid_pass(tmp_path):
    """mmpretrain's transformers resize positions when they load, whichever way they are loaded."""

    class Classifier(BaseModel):
        def __init__(self, size):
            super().__init__()
            arch = dict(embed_dims=16, num_layers=1, num_heads=1, feedforward_channels=16)
            self.backbone = ViT(arch, img_size=size, patch_size=16)

        def forward(self, *images, mode):
            return self.backbone(torch.stack(images))[-1]

    path = save(tmp_path, Classifier(64).state_dict())
    runner(tmp_path, Classifier(32), load_from=path).test()
