"""Converted and published files: our names, the same tensors, hashes, and what stays out."""

import hashlib
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    ("variant", "attention"), [("light", LIGHT), ("base", BASE), (None, LIGHT)]
)
def test_converted_files_hold_the_same_tensors(variant, attention, tmp_path):
    released = released_resnet(variant) if variant else plain_resnet()
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
        assert load_weights(other, path).fresh
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
    assert stem_of(first) == "a" and stem_of("x/y.pth") == "y"


def test_a_hash_of_digits_alone_is_made_longer(tmp_path, monkeypatch):
    """Or nobody would know it from the number of a run: one file in 43 has one."""
    numbers = (save_published({"number": number}, tmp_path, "a") for number in range(500))
    assert {stem_of(path) for path in numbers} == {"a"}
    assert {len(path.stem) for path in tmp_path.glob("*")} > {len("a-") + 8}

    def write_half(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space"):
        save_published({"state_dict": {"weight": torch.ones(3)}}, tmp_path, "model")
    assert not list(tmp_path.glob("model*.pth")), "one that could not be written whole"


def training_checkpoint(tmp_path):
    model = torch.nn.ModuleDict({"backbone": scatter(narrow())})
    model["bbox_head"] = torch.nn.Linear(2, 2)
    model["bbox_head"].bias.data = torch.zeros(10**7)[:2]  # a view: torch.save writes all of it
    meta = {"epoch": 12, "dataset_meta": {"classes": ("cat", "dog")}, "cfg": "x = 1", "seed": 5}
    content = {
        "meta": meta,
        "state_dict": torch.nn.ModuleDict({"module": model}).state_dict(),
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
        "ema_state_dict": {"module.backbone.conv1.weight": torch.zeros(1)},
    }
    return save(tmp_path, content, "epoch_12.pth")


def test_publishing_keeps_the_model_and_nothing_of_the_training(tmp_path, capsys):
    path = training_checkpoint(tmp_path)
    load_tool("publish_weights").main([str(path), str(tmp_path / "new/model.pth")])
    (published,) = tmp_path.glob("new/model-????????.pth")
    content = torch.load(published, weights_only=True)
    assert set(content) == {"meta", "state_dict"}
    assert content["meta"]["dataset_meta"] == {"classes": ("cat", "dog")}
    assert set(content["meta"]) == {"epoch", "dataset_meta", "cfg", "mrla_mm_version"}
    original = torch.load(path, weights_only=True)["state_dict"]
    assert same(prefixed(content["state_dict"], "module."), original)
    assert "left behind: optimizer, ema_state_dict" in capsys.readouterr().out
    assert published.stat().st_size < 2 * sum(value.nbytes for value in original.values())
    converted, _, left_out = convert(published, narrow(), folder=tmp_path)
    assert left_out == ["bbox_head.weight", "bbox_head.bias"]
    assert all(key.startswith("backbone.") for key in read_checkpoint(converted)["state_dict"])
