"""Converted files: the authors' layout there and back to the same bytes, hashes, safety, and proof by forwarding."""

import hashlib

import pytest
import torch
from mmengine.config import Config

from mrla_mm.errors import InputError
from mrla_mm.weights import convert, load_weights, read_checkpoint, save_published, stem_of

from ..conftest import load_tool
from .conftest import (
    BASE,
    LIGHT,
    narrow,
    plain_resnet,
    prefixed,
    released_resnet,
    same,
    save,
    scatter,
)


def there_and_back(build, path, tmp_path):
    """Convert a file to our layout and that to the authors'; return both new paths."""
    ours, _, left = convert(path, build(), target="mrla_mm", folder=tmp_path / "ours")
    assert not left
    theirs, _, left = convert(ours, build(), target="release", folder=tmp_path / "theirs")
    assert not left
    return ours, theirs


def bytes_of(state):
    return {
        key: (value.dtype, tuple(value.shape), value.numpy().tobytes())
        for key, value in state.items()
    }


@pytest.mark.parametrize(
    ("variant", "attention"), [("light", LIGHT), ("base", BASE), (None, LIGHT)]
)
def test_released_resnets_come_back_to_the_same_bytes(variant, attention, tmp_path):
    """Classifier included; None is a plain torchvision file, which has no layer attention to invent."""
    released = released_resnet(variant) if variant else plain_resnet()
    ours, theirs = there_and_back(lambda: narrow(18, attention), save(tmp_path, released), tmp_path)
    assert bytes_of(read_checkpoint(theirs)["state_dict"]) == bytes_of(released)
    converted = read_checkpoint(ours)["state_dict"]
    assert {key.partition(".")[0] for key in converted} == {"backbone", "head"}
    assert any(".mrla." in key for key in converted) == (variant is not None)


def test_names_and_hashes(tmp_path):
    """The name has the first digits of the SHA-256; the same weights make the same file."""
    path = save(tmp_path, released_resnet("light"))
    first, _, _ = convert(path, narrow(18, LIGHT), target="mrla_mm", folder=tmp_path, stem="a")
    digest = hashlib.sha256(first.read_bytes()).hexdigest()
    assert first.name == f"a-{digest[:8]}.pth"
    second, _, _ = convert(first, narrow(18, LIGHT), target="mrla_mm", folder=tmp_path, stem="b")
    assert second.read_bytes() == first.read_bytes()
    assert stem_of(first) == "a" and stem_of("x/y.pth") == "y"


def test_a_converted_file_knows_its_attention(tmp_path):
    """What shapes cannot tell goes along, so heads of another width are refused from then on."""
    ours, theirs = there_and_back(
        lambda: narrow(18, BASE), save(tmp_path, released_resnet("base")), tmp_path
    )
    for path in (ours, theirs):
        load_weights(narrow(18, BASE), path)
        with pytest.raises(InputError, match="head_channels=16, the model has 8"):
            load_weights(narrow(18, dict(BASE, head_channels=8)), path)


@pytest.mark.parametrize("key", ["backbone.layer2.0.bn1.bias", "head.fc.bias"])
def test_a_conversion_that_changes_anything_is_removed(key, tmp_path, monkeypatch):
    """The proof can fail: a value off by a little in what was written."""

    def spoil(checkpoint, folder, stem):
        checkpoint["state_dict"][key] += 1e-6
        return save_published(checkpoint, folder, stem)

    monkeypatch.setattr("mrla_mm.weights.publishing.save_published", spoil)
    path = save(tmp_path, released_resnet("light"))
    with pytest.raises(InputError, match="removed"):
        convert(path, narrow(18, LIGHT), target="mrla_mm", folder=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_only_variants_of_the_release_convert_to_it(tmp_path):
    model = scatter(narrow(18, dict(type="MLA", head_channels=16)))
    path = save(tmp_path, model.state_dict())
    with pytest.raises(InputError, match="MLA"):
        convert(path, model, target="release", folder=tmp_path)


def training_checkpoint(tmp_path):
    """What mmengine saves of a detector in training."""
    model = torch.nn.ModuleDict(
        {"backbone": scatter(narrow(18, LIGHT)), "bbox_head": torch.nn.Linear(2, 2)}
    )
    content = {
        "meta": {
            "epoch": 12,
            "dataset_meta": {"classes": ("cat", "dog")},
            "cfg": "x = 1",
            "seed": 5,
        },
        "state_dict": prefixed(model.state_dict(), "module."),
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
        "ema_state_dict": {"module.backbone.conv1.weight": torch.zeros(1)},
    }
    return save(tmp_path, content, "epoch_12.pth")


def test_publishing_keeps_the_model_and_nothing_of_the_training(tmp_path, capsys):
    path = training_checkpoint(tmp_path)
    load_tool("publish_weights").main([str(path), str(tmp_path / "new/model.pth")])
    (published,) = tmp_path.glob("new/model-????????.pth")
    content = torch.load(published, weights_only=True)
    assert set(content) == {"meta", "state_dict"} and content["meta"]["dataset_meta"] == {
        "classes": ["cat", "dog"]
    }
    assert set(content["meta"]) == {"epoch", "dataset_meta", "cfg", "mrla_mm_version"}
    original = torch.load(path, weights_only=True)["state_dict"]
    assert same(prefixed(content["state_dict"], "module."), original)
    assert "left behind: optimizer, ema_state_dict" in capsys.readouterr().out
    assert load_weights(narrow(18, LIGHT), published).heads == [
        "bbox_head.weight",
        "bbox_head.bias",
    ]


def test_tool_says_what_a_detector_leaves_out(tmp_path, capsys):
    """A detector's checkpoint converts to its backbone; heads that have no place in the layout are named."""
    backbone = dict(type="MRLAResNet", depth=18, base_channels=16, layer_attention=LIGHT)
    backbone["init_cfg"] = dict(type="Pretrained", checkpoint="-")
    config = tmp_path / "config.py"
    Config(dict(model=dict(type="RetinaNet", backbone=backbone), default_scope="mmdet")).dump(
        str(config)
    )
    path = training_checkpoint(tmp_path)
    load_tool("convert_weights").main(
        [str(path), str(config), "--name", "r18", "--out-dir", str(tmp_path / "out")]
    )
    assert "bbox_head.weight" in capsys.readouterr().out
    (converted,) = (tmp_path / "out").glob("r18-*.pth")
    assert all(key.startswith("backbone.") for key in read_checkpoint(converted)["state_dict"])
