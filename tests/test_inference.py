"""A model has all the weights of its checkpoint; how tools choose images."""

from functools import partial

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config

from mrla_mm import cli
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model, load_model

from .weights.conftest import save as save_file

CONFIG = """
default_scope = "mmpretrain"
data_preprocessor = dict(num_classes=3, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="MRLAResNet", depth=18, base_channels=8, num_stages=1, strides=(1,), dilations=(1,),
        out_indices=(0,), layer_attention={attention},
    ),
    neck=dict(type="GlobalAveragePooling"),
    head=dict(type="LinearClsHead", num_classes=3, in_channels=8),
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=32, edge="short"),
    dict(type="PackInputs"),
]
test_dataloader = dict(dataset=dict(type="CustomDataset", pipeline=pipeline))
"""
LIGHT = 'dict(type="MRLALight", head_channels=8)'


@pytest.fixture
def config(tmp_path):
    (tmp_path / "light.py").write_text(CONFIG.format(attention=LIGHT))
    return str(tmp_path / "light.py")


@pytest.fixture
def plain_config(tmp_path):
    text = CONFIG.replace("layer_attention={attention},", "")
    text = text.replace("MRLAResNet", "mmpretrain.ResNet")
    (tmp_path / "plain.py").write_text(text)
    return str(tmp_path / "plain.py")


@pytest.fixture
def state(config):
    torch.manual_seed(0)
    return build_model(Config.fromfile(config)).state_dict()


@pytest.fixture
def save(tmp_path):
    return partial(save_file, tmp_path)


def test_every_weight_is_the_files_and_images_are_normalised_as_in_training(config, state, save):
    saved = {f"module.{key}": value for key, value in state.items()}
    torch.manual_seed(1)
    loaded = load_model(config, save(dict(state_dict=saved)), device="cpu")
    model = loaded.model
    assert not model.training and loaded.cfg.default_scope == "mmpretrain"
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert model.data_preprocessor.mean.flatten().tolist() == [1, 2, 3], "it is beside the model"


def parsed(*argv):
    parser = cli.picture_parser("visualize_cam", "", compare=True)
    return parser.parse_args([str(argument) for argument in argv])


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("b.png", "a.jpg", "a.png"):
        cv2.imwrite(str(folder / name), np.full((48, 64, 3), (0, 100, 200), np.uint8))
    (folder / "notes.txt").touch()
    return folder


def test_results_never_lie_among_the_images_and_no_image_is_said(images):
    args = parsed("c.py", "c.pth", images / "b.png", "--out-dir", f"{images}/../images")
    with pytest.raises(InputError, match="another --out-dir"):
        cli.chosen_images(args)
    with pytest.raises(InputError, match="neither an image"):
        cli.chosen_images(parsed("c.py", "c.pth", images.parent / "none"))


def test_models_to_compare_see_an_image_as_the_test_pipeline_prepares_it(
    config, plain_config, state, images, save
):
    meta = dict(dataset_meta=dict(CLASSES=("a", "b", "c")))
    one = save(dict(state_dict=state, meta=meta), "one.pth")
    of_mmdet_2 = dict(CLASSES=("d", "e", "f"))
    two = save(dict(state_dict=state, meta=of_mmdet_2), "two.pth")
    plain = save(build_model(Config.fromfile(plain_config)).state_dict(), "plain.pth")
    compared = ["--compare", config, two, "--compare", plain_config, plain]
    models = cli.load_models(parsed(config, one, images, "--device", "cpu", *compared))
    assert [each.name for each in models] == ["light, one", "light, two", "plain, plain"]
    assert [each.classes for each in models] == [("a", "b", "c"), ("d", "e", "f"), ()]
    inputs, _, picture = models[0].prepare(images / "b.png")
    assert picture.shape == (32, 42, 3) and inputs.shape == (1, 3, 32, 42)
    assert picture[0, 0].tolist() == [200, 100, 0], "RGB"
    normalised = [(0 - 1) / 4, (100 - 2) / 5, (200 - 3) / 6]
    np.testing.assert_allclose(inputs[0, :, 0, 0], normalised, rtol=1e-5)
