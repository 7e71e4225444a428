"""Classification data sets are checked before a run: folders, lists, numbers of classes, order of names."""

import warnings

import pytest
from mmengine.config import Config
from mmengine.registry import init_default_scope

from mrla_mm.datasets import checks

from ..conftest import ROOT, write_class_folders
from .conftest import message

CONFIG = Config.fromfile(ROOT / "configs/imagenet/resnet50_mrla_light_8xb32.py")
CLASSES = ("bird", "cat", "dog")


@pytest.fixture
def root(tmp_path):
    return write_class_folders(tmp_path / "pets", images=(2, 1))


def config(root, classes=CLASSES, head=3, **dataset):
    """Return the pre-training config on a set of one's own."""
    cfg = Config(CONFIG.to_dict())
    for phase in ("train", "val", "test"):
        cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), **dataset)
        if classes is not None:
            cfg[f"{phase}_dataloader"].dataset.metainfo = dict(classes=classes)
    cfg.model.head.num_classes = head
    return cfg


def test_intact_set_passes(root):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.check_datasets(config(root), ("train", "val", "test"))


def test_missing_folder_says_what_is_expected_and_how_to_set_it(tmp_path):
    said = message(config(tmp_path / "imagenet"))
    assert f"train data: image folder {tmp_path}/imagenet/train does not exist" in said
    assert "<data_root>/<split>/<class>/*.jpg" in said
    assert "--cfg-options train_dataloader.dataset.data_root=/path/to/set" in said
    assert "--cfg-options data_root=/path/to/set" in message(CONFIG), "which moves what lies below it"


def test_folder_without_classes(root):
    (root / "flat/train").mkdir(parents=True)
    (root / "flat/train/1.jpg").touch()
    assert "has no class folders" in message(config(root / "flat"))


def test_empty_class_folders(tmp_path):
    for name in CLASSES:
        (tmp_path / "train" / name).mkdir(parents=True)
    assert "no folder below" in message(config(tmp_path))


def test_number_of_folders_is_the_number_of_classes(root):
    said = message(config(root, classes=None))
    assert "3 class folders ('bird', 'cat', 'dog'), the data set is built with 1000 classes" in said
    assert "metainfo.classes" in said


def test_head_has_the_number_of_classes(root):
    assert "model.head.num_classes=1000: set --cfg-options model.head.num_classes=3" in message(config(root, head=1000))


@pytest.mark.parametrize("own", ["data_preprocessor", "model.data_preprocessor"])
def test_mixed_labels_have_the_number_of_classes(own, root):
    """Where images are mixed; a recipe that mixes none does not count by its preprocessor."""
    cfg = config(root)
    cfg.merge_from_dict({f"{own}.num_classes": 1000})
    checks.check_datasets(cfg, ("train",))
    cfg.model.train_cfg = dict(augments=[dict(type="Mixup", alpha=0.8)])
    assert f"{own}.num_classes=1000, by which the labels of mixed images are written" in message(cfg, phases=("train",))
    assert f"set --cfg-options {own}.num_classes=3" in message(cfg, phases=("train",))
    checks.check_datasets(cfg, ("val", "test"))
    cfg.merge_from_dict({f"{own}.num_classes": 3})
    checks.check_datasets(cfg, ("train",))


def test_same_folders_in_training_and_evaluation(root):
    (root / "val/dog").rename(root / "val/cow")
    assert "only train has 'dog'; only val has 'cow'" in message(config(root))


def test_names_in_another_order_than_the_folders_warn(root):
    with pytest.warns(UserWarning, match="names shown with predictions are exchanged"):
        checks.check_datasets(config(root, classes=("cat", "bird", "dog")), ("train",))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("bird/0.jpg 0\ncat/0.jpg 7\n", "line 2 of"),
        ("bird/0.jpg\n", "line 1 of"),
        ("", "is empty"),
        (None, "does not exist"),
    ],
)
def test_lists_of_images(lines, expected, root):
    if lines is not None:
        (root / "train.txt").write_text(lines)
    assert expected in message(config(root, ann_file="train.txt", data_prefix="train"), phases=("train",))


def test_the_list_in_imagenets_meta_folder_is_used(root):
    """mmpretrain takes meta/<split>.txt by itself, so it is what is checked."""
    (root / "meta").mkdir()
    (root / "meta/train.txt").write_text("bird/0.jpg 9\n")
    assert "line 1 of" in message(config(root), phases=("train",))


def test_list_without_class_names(root):
    """Labels up to the head's size pass, also when the last class has no image in this list; larger ones do not."""
    (root / "l.txt").write_text("bird/0.jpg 0\ndog/0.jpg 2\n")
    options = dict(type="CustomDataset", ann_file="l.txt", data_prefix="train", split="")
    for head in (3, 4):
        checks.check_datasets(config(root, classes=None, head=head, **options), ("train",))
    assert "labels up to 2, but model.head.num_classes=2" in message(
        config(root, classes=None, head=2, **options), phases=("train",)
    )


def test_checked_names_are_those_mmpretrain_builds(root):
    """The labels that the check assumes are the labels of the built data set."""
    from mmpretrain.registry import DATASETS

    init_default_scope("mmpretrain")
    built = DATASETS.build(config(root).train_dataloader.dataset)
    assert built.folder_to_idx == {name: label for label, name in enumerate(sorted(CLASSES))}
