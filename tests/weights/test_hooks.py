"""Whole checkpoints: tests and resumed runs take their own only, a fine-tuning at least a backbone that matches."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

from mrla_mm.backbones import MRLAResNet, ViT
from mrla_mm.errors import InputError

from .conftest import released_resnet

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


def test_testing_takes_the_models_own_checkpoint_only(tmp_path):
    """A deeper model's has all that the model needs, and more; plain weights lack the layer attention."""
    path = save(tmp_path, Detector().state_dict())
    runner(tmp_path, Detector(), load_from=path).test()
    for other in (Detector(classes=3), Detector(depth=34)):
        with pytest.raises(InputError, match="nothing was loaded"):
            runner(tmp_path, other, load_from=path).test()
    with pytest.raises(InputError):
        runner(tmp_path, Detector(), load_from=save(tmp_path, Detector(depth=34).state_dict())).test()
    plain = {key: value for key, value in Detector().state_dict().items() if ".mrla." not in key}
    with pytest.raises(InputError, match="mrla"):
        runner(tmp_path, Detector(), load_from=save(tmp_path, plain)).test()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(depth=34), "another depth"),
        (dict(classes=3), "The backbone matches"),
        (dict(attention=dict(type="MRLALight", head_channels=16, previous="none")), "Only layer attention"),
    ],
)
def test_the_message_says_what_the_file_probably_is(tmp_path, other, reason):
    path = save(tmp_path, Detector(**other).state_dict())
    with pytest.raises(InputError, match=reason) as caught:
        runner(tmp_path, Detector(), load_from=path).test()
    assert len(str(caught.value).replace(str(tmp_path), "")) < 700


def test_heads_of_another_width_are_refused(tmp_path):
    """The shapes are the same; the config in the checkpoint tells."""
    cfg = "model = dict(backbone=dict(layer_attention=dict(type='MRLALight', head_channels=8)))"
    path = save(tmp_path, Detector().state_dict(), dict(cfg=cfg))
    with pytest.raises(InputError, match="head_channels=8"):
        runner(tmp_path, Detector(), load_from=path).test()


def test_fine_tuning_may_change_the_head(tmp_path):
    path = save(tmp_path, Detector(classes=5).state_dict())
    built = runner(tmp_path, Detector(), load_from=path)
    built.train()
    assert built.epoch == 2


def test_fine_tuning_from_another_backbone_is_refused(tmp_path):
    for state in (Detector(depth=34).state_dict(), nn.Linear(2, 2).state_dict()):
        with pytest.raises(InputError):
            runner(tmp_path, Detector(), load_from=save(tmp_path, state)).train()


def test_plain_weights_and_the_authors_start_a_detector(tmp_path):
    state = Detector().state_dict()
    plain = {key: value for key, value in state.items() if ".mrla." not in key}
    runner(tmp_path, Detector(), load_from=save(tmp_path, plain)).train()
    released = {f"backbone.{key}": value for key, value in released_resnet("light").items()}
    released = {key: value for key, value in released.items() if not key.startswith(("backbone.layer4", "backbone.fc"))}
    built = runner(tmp_path, Detector(), load_from=save(tmp_path, released))
    built.train()
    scale = built.model.backbone.layer1[0].mrla.attention.history_scale
    torch.testing.assert_close(scale, released["backbone.layer1.0.mrla.lambda_t"].flatten(), atol=0.1, rtol=0)


def test_resuming_takes_the_runs_own_checkpoint_only(tmp_path):
    path = save(tmp_path, Detector(classes=5).state_dict(), dict(epoch=1, iter=1))
    with pytest.raises(InputError, match="head.weight"):
        runner(tmp_path, Detector(), load_from=path, resume=True).train()


def test_frozen_random_layers_are_a_warning(tmp_path):
    """mmdet's defaults keep batch statistics as they are, which without pretrained weights are zero and one."""
    path = save(tmp_path, Detector().state_dict())
    for more, free in (({}, False), (dict(load_from=path), True)):
        runner(tmp_path / str(free), Detector(), **more).train()
        (log,) = (tmp_path / str(free)).glob("*/*.log")
        assert ("RANDOM WEIGHTS" not in log.read_text()) == free
    detector = Detector()
    detector.backbone.norm_eval = False
    runner(tmp_path / "trained", detector).train()
    (log,) = (tmp_path / "trained").glob("*/*.log")
    assert "frozen_stages=1" not in log.read_text() and "RANDOM" not in log.read_text()


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
