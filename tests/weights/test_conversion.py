"""Converted files: our names, the same tensors, hashes, and what stays out."""

import hashlib

import pytest
import torch

from mrla_mm.errors import InputError
from mrla_mm.weights import KeyStatus, convert, load_weights, read_checkpoint

from ..conftest import ROOT, write_class_folders
from .conftest import BASE, LIGHT, narrow, prefixed, released_resnet, same, save, scatter


@pytest.mark.parametrize(
    ("variant", "attention"), [("light", LIGHT), ("base", BASE), (None, LIGHT)]
)
def test_converted_files_hold_the_same_tensors(variant, attention, tmp_path):
    released = released_resnet(variant)
    model = narrow(18, attention)
    path, _, left_out = convert(save(tmp_path, released), model, folder=tmp_path)
    converted = read_checkpoint(path)["state_dict"]
    assert len(converted) == len(released) and not left_out
    assert torch.equal(converted.pop("head.fc.weight"), released["fc.weight"])
    assert torch.equal(converted.pop("head.fc.bias"), released["fc.bias"])
    assert any(".mrla." in key for key in converted) == (variant is not None)
    loaded = prefixed(model.state_dict(), "backbone.")
    assert same(converted, {key: loaded[key] for key in converted})
    other = narrow(18, dict(attention, head_channels=8))
    if variant is None:
        assert load_weights(other, path).keys[KeyStatus.NEW_ATTENTION]
    else:
        with pytest.raises(InputError, match="head_channels=16, the model has 8"):
            load_weights(other, path)


def test_names_and_hashes(tmp_path):
    path = save(tmp_path, released_resnet("light"))
    first, _, _ = convert(path, narrow(), folder=tmp_path, stem="a")
    digest = hashlib.sha256(first.read_bytes()).hexdigest()
    assert first.name == f"a-{digest[:8]}.pth"
    second, _, _ = convert(first, narrow(), folder=tmp_path, stem="b")
    assert second.read_bytes() == first.read_bytes()
    third, _, _ = convert(path, narrow(), folder=tmp_path)
    assert third.name == f"w-mrla_mm-{digest[:8]}.pth"


def test_a_detectors_heads_are_left_out(tmp_path):
    model = torch.nn.ModuleDict({"backbone": scatter(narrow()), "bbox_head": torch.nn.Linear(2, 2)})
    path = save(tmp_path, {"meta": {"epoch": 12}, "state_dict": model.state_dict()})
    converted, _, left_out = convert(path, narrow(), folder=tmp_path)
    assert left_out == ["bbox_head.weight", "bbox_head.bias"]
    content = read_checkpoint(converted)
    assert content["meta"] == {"epoch": 12}
    assert same(content["state_dict"], prefixed(model["backbone"].state_dict(), "backbone."))


RECIPE = ROOT / "configs/imagenet/resnet50_mrla_light_8xb32.py"


def recipe_options(root):
    backbone = ("depth=18", "base_channels=16", "layer_attention.head_channels=16")
    options = [f"model.backbone.{option}" for option in backbone]
    options += [f"data_root={root}", "model.head.in_channels=128"]
    options += ["model.head.num_classes=3", "model.head.topk=1", "train_cfg.max_epochs=1"]
    options += ["default_hooks.logger.interval=1", "val_evaluator.topk=1", "test_evaluator.topk=1"]
    options.append("train_dataloader.dataset.pipeline.1.scale=48")
    for loader in ("train_dataloader", "val_dataloader", "test_dataloader"):
        options += [f"{loader}.batch_size=8", f"{loader}.num_workers=0"]
        options.append(f"{loader}.dataset.metainfo.classes=(bird,cat,dog)")
    return options


def test_a_pretrained_classifier_starts_a_detectors_backbone(tmp_path, run_tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = recipe_options(write_class_folders(tmp_path / "pets"))

    def run(*arguments):
        code, errors = run_tool(*arguments)
        assert code == 0, errors

    run("train", RECIPE, "--work-dir", "pre", "--cfg-options", *options)
    recipe = f"pre/{RECIPE.name}"  # as it ran, which mmengine keeps beside the checkpoints
    run("convert_weights", "pre/epoch_1.pth", recipe, "--out-dir", "out", "--name", "mine")
    (converted,) = (tmp_path / "out").glob("mine-*.pth")
    backbone = narrow()
    assert len(load_weights(backbone, converted).keys[KeyStatus.MATCHED]) == 192
    classifier = read_checkpoint("pre/epoch_1.pth")["state_dict"]
    for key, tensor in prefixed(backbone.state_dict(), "backbone.").items():
        assert torch.equal(tensor, classifier[key]), key
