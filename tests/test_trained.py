"""A model gets all the weights of a checkpoint or none, and what is wrong with the file is said with its name."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn

from mrla_mm.errors import InputError
from mrla_mm.trained import build_model, load_model

CONFIG = """
default_scope = "mmpretrain"
data_preprocessor = dict(num_classes=3, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="MRLAResNet", depth=18, base_channels=8, num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,),
        layer_attention={attention},
    ),
    neck=dict(type="GlobalAveragePooling"),
    head=dict(type="LinearClsHead", num_classes=3, in_channels=8),
)
"""
LIGHT = 'dict(type="MRLALight", head_channels=8)'


@pytest.fixture
def write(tmp_path):
    """Return `write(attention)`, which writes a config and returns its path."""

    def write(attention=LIGHT, name="light.py"):
        (tmp_path / name).write_text(CONFIG.format(attention=attention))
        return str(tmp_path / name)

    return write


@pytest.fixture
def state(write):
    path = write()
    torch.manual_seed(0)
    return build_model(Config.fromfile(path), path).state_dict()


@pytest.fixture
def write_plain(write):
    """Return `write_plain()`, which writes the config of the same ResNet without layer attention."""

    def write_plain():
        path = Path(write(name="plain.py"))
        text = path.read_text().replace(f"layer_attention={LIGHT},", "").replace("MRLAResNet", "mmpretrain.ResNet")
        path.write_text(text)
        return str(path)

    return write_plain


def save(content, tmp_path):
    torch.save(content, tmp_path / "file.pth")
    return tmp_path / "file.pth"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_every_weight_is_the_files_and_images_are_normalised_as_in_training(prefix, write, state, tmp_path):
    saved = {prefix + key: value for key, value in state.items()}
    path = save(dict(state_dict=saved, meta=dict(dataset_meta=dict(classes=("a", "b", "c")))), tmp_path)
    torch.manual_seed(1)
    model, cfg, meta = load_model(write(), path, device="cpu")
    assert not model.training and cfg.default_scope == "mmpretrain" and meta["dataset_meta"]["classes"][0] == "a"
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert model.data_preprocessor.mean.flatten().tolist() == [1, 2, 3], "mmpretrain's configs have it beside the model"


def optimizer_alone():
    parameter = nn.Parameter(torch.zeros(2))
    return dict(optimizer=torch.optim.Adam([parameter]).state_dict(), meta={})


BAD_FILES = {
    "text": (lambda path, state: path.write_text("epoch 12\n"), "are damaged or no PyTorch checkpoint"),
    "empty": (lambda path, state: path.write_bytes(b""), "are an empty file"),
    "truncated": (
        lambda path, state: (torch.save(state, path), path.write_bytes(path.read_bytes()[:-900])),
        "are cut off",
    ),
    "list": (lambda path, state: torch.save([1, 2], path), "hold a list, not a state dict"),
    "optimizer": (
        lambda path, state: torch.save(optimizer_alone(), path),
        "no weights found: there is no tensor among optimizer, meta",
    ),
    "other": (
        lambda path, state: torch.save({"conv.weight": torch.ones(2)}, path),
        "1 keys of the file are not in the model: conv.weight",
    ),
    "shape": (
        lambda path, state: torch.save(state | {"head.fc.weight": torch.ones(5, 8)}, path),
        r"1 tensors have another shape: head.fc.weight \(5, 8\) in the file, \(3, 8\) in the model",
    ),
    "nan": (
        lambda path, state: torch.save(state | {"head.fc.bias": torch.full((3,), torch.nan)}, path),
        r"head.fc.bias \(it holds NaN, infinity or numbers too large",
    ),
    "one missing": (
        lambda path, state: torch.save({k: v for k, v in state.items() if k != "head.fc.bias"}, path),
        "1 keys of the model are not in the file: head.fc.bias",
    ),
    "trained otherwise": (
        lambda path, state: torch.save(
            dict(state_dict=state, meta=dict(layer_attention=dict(type="MRLALight", head_channels=4))), path
        ),
        "the file was trained with layer_attention head_channels=4, the model has 8",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_checkpoint_of_the_model_is_named(make, message, write, state, tmp_path):
    path = tmp_path / "given.pth"
    make(path, state)
    with pytest.raises(InputError, match=f"{re.escape(str(path))}.*{message}"):
        load_model(write(), path, device="cpu")


def test_layer_attention_is_neither_dropped_nor_left_at_its_start(write, write_plain, state, tmp_path):
    with pytest.raises(InputError, match=r"keys of the file are not in the model: backbone\.layer1\.0\.mrla"):
        load_model(write_plain(), save(state, tmp_path), device="cpu")
    plain = {key: value for key, value in state.items() if "mrla" not in key}
    with pytest.raises(InputError, match=r"keys of the model are not in the file: backbone\.layer1\.0\.mrla"):
        load_model(write(), save(plain, tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\n", "has no model; give that of a training"),
        ("model = 'ResNet'\n", "has no model; give that of a training"),
        ("model = dict(type='ResNett')\n", "cannot be built: KeyError: 'ResNett is not in"),
        ("model = dict(type='mmpretrain.ResNet', depth=50, deep=1)\n", "cannot be built: TypeError: .*'deep'"),
    ],
)
def test_a_config_without_a_model_that_can_be_built_is_named(text, message, tmp_path):
    (tmp_path / "given.py").write_text(text)
    with pytest.raises(InputError, match=f"given.py {message}"):
        load_model(str(tmp_path / "given.py"), tmp_path / "nothing.pth", device="cpu")


@pytest.mark.parametrize("device", ["meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device, tmp_path):
    with pytest.raises(InputError, match=f"--device {device} cannot be used here"):
        load_model("nowhere.py", tmp_path / "nothing.pth", device=device)
