"""Data sets are checked before a run: each way of being broken has one message with the value and the remedy."""

import copy
import json
import warnings

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from mrla_mm.datasets import checks, coco_file, images
from mrla_mm.errors import InputError

from ..conftest import ROOT

CONFIG = ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py"
TRAIN = "annotations/instances_train2017.json"


@pytest.fixture(scope="module")
def make_config():
    """Return `make(root, **metainfo)`: the Mask R-CNN config on the set at `root`."""
    original = Config.fromfile(CONFIG)

    def make(root, **metainfo):
        cfg = copy.deepcopy(original)
        for phase, split in (("train", "train2017"), ("val", "val2017")):
            cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), metainfo=metainfo)
            cfg[f"{phase}_evaluator"] = dict(type="CocoMetric", ann_file=f"{root}/annotations/instances_{split}.json")
        return cfg

    return make


def message(cfg, phases=("train", "val")):
    with pytest.raises(InputError) as caught:
        checks.check_datasets(cfg, phases)
    return str(caught.value)


def edit(root, change, name=TRAIN):
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def built(cfg, phase="train"):
    init_default_scope("mmdet")
    return DATASETS.build(cfg[f"{phase}_dataloader"].dataset)


def test_intact_set_passes(coco_root, make_config):
    """An intact set with COCO's classes raises nothing and warns of nothing."""
    cfg = make_config(coco_root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.check_datasets(cfg, ("train", "val"))


def test_missing_set_says_where_and_how(tmp_path, make_config):
    """Nothing at data_root: the message has the path, what is there instead, and both ways to put it right."""
    (tmp_path / "something").touch()
    said = message(make_config(tmp_path / "coco"))
    assert f"{tmp_path}/coco/{TRAIN} does not exist" in said
    assert "'something'" in said and "ln -s" in said and "data_root=" in said


def test_missing_evaluator_file(coco_root, make_config):
    """The evaluator's own path is checked too: it is not moved with the data set's."""
    cfg = make_config(coco_root)
    cfg.val_evaluator = [dict(type="CocoMetric", ann_file="elsewhere/val.json")]
    said = message(cfg)
    assert "val_evaluator" in said and "elsewhere/val.json" in said and "val_evaluator.ann_file" in said


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "is empty"),
        (b"\xff\xd8\xff\xe0 a picture", "not a text file"),
        (b"<html>404</html>", "not valid JSON"),
        (b'{"images": [{"id": 1, "file_na', "cut off"),
        (b'{"images": [{"id": 1,', "cut off"),
        (b"[]", "holds a list"),
        (b'{"images": [], "annotations": []}', "no list 'categories'"),
        (b'{"images": {}, "annotations": [], "categories": []}', "no list 'images'"),
        (
            b'{"images": [{"id": 1}], "annotations": [], "categories": []}',
            "images[0] lacks ['file_name', 'height', 'width']",
        ),
        (b'{"images": [], "annotations": [{}], "categories": []}', "annotations[0] lacks"),
    ],
)
def test_broken_annotation_file(content, expected, make_coco, make_config):
    """Whatever the file is instead of a COCO annotation file is named with its path."""
    root = make_coco(images=1)
    (root / TRAIN).write_bytes(content)
    said = message(make_config(root))
    assert expected in said and str(root / TRAIN) in said


@pytest.mark.parametrize("large", [False, True])
def test_truncated_file_of_any_size(large, make_coco, make_config, monkeypatch):
    """A real file cut at any point is found, by the glance at large files too."""
    root = make_coco(images=2)
    whole = (root / TRAIN).read_bytes()
    monkeypatch.setattr(coco_file, "PARSE_LIMIT", 10 if large else 2**26)
    for share in (0.01, 0.3, 0.7, 0.999):
        (root / TRAIN).write_bytes(whole[: int(len(whole) * share)])
        assert "not valid JSON" in message(make_config(root))


def test_large_sound_file_is_not_parsed(coco_root, make_config, monkeypatch):
    """Of a large sound file only the categories are read; names that match nothing are found there too."""

    def refuse(path, **kwargs):
        raise AssertionError(f"parsed {path}")

    monkeypatch.setattr(coco_file, "PARSE_LIMIT", 10)
    monkeypatch.setattr(coco_file, "read_annotations", refuse)
    checks.check_datasets(make_config(coco_root), ("train", "val"))
    cfg = make_config(coco_root, classes=[f"thing {i}" for i in range(80)])
    assert "no class name matches" in message(cfg)


@pytest.mark.parametrize("position", ["first", "last"])
def test_glance_finds_categories_anywhere(position, tmp_path):
    """COCO writes the categories last, other tools first; a key of that name inside an image does not mislead."""
    categories = [dict(id=1, name="a"), dict(id=2, name="b")]
    rest = dict(images=[dict(id=1, file_name="x.jpg", categories="?", height=1, width=1)], annotations=[])
    content = dict(categories=categories) | rest if position == "first" else rest | dict(categories=categories)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, indent=2))
    seen = coco_file.glance(path)
    assert seen is None or seen["categories"] == categories
    assert (seen is None) == (position == "first")  # misled by the nested key, it falls back to a whole parse


def test_image_folder_missing_or_empty(make_coco, make_config):
    """A missing and an empty image folder are told apart and named."""
    root = make_coco(images=1)
    for image in (root / "train2017").iterdir():
        image.unlink()
    assert f"image folder {root}/train2017 is empty" in message(make_config(root))
    (root / "train2017").rmdir()
    said = message(make_config(root))
    assert f"image folder {root}/train2017 does not exist" in said and "data_prefix.img" in said


def test_no_class_name_matches(make_coco, make_config):
    """mmdet would train on zero objects: the message shows both lists of names."""
    root = make_coco(images=1, names=["Cat", "Dog"])
    cfg = make_config(root, classes=("cat", "dog"))
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 2
    said = message(cfg)
    assert "'cat', 'dog'" in said and "'Cat', 'Dog'" in said and "metainfo.classes" in said


def test_some_names_do_not_match(make_coco, make_config):
    """Names without a category are listed in a warning, which says that the label numbers shift."""
    root = make_coco(images=1, names=["a", "b"])
    cfg = make_config(root, classes=("a", "b", "zebra"))
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 3
    with pytest.warns(UserWarning, match="1 of 3 classes: 'zebra'.*shifted"):
        checks.check_datasets(cfg, ("train",))


def test_order_of_names_warns(make_coco, make_config):
    """mmdet numbers classes in the file's order: another order in the config exchanges the names shown."""
    root = make_coco(images=1, names=["a", "b"])
    cfg = make_config(root, classes=("b", "a"))
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 2
    with pytest.warns(UserWarning, match="another order.*'a', 'b'.*'b', 'a'"):
        checks.check_datasets(cfg, ("train",))
    dataset = built(cfg)
    assert dataset.cat2label == {1: 0, 2: 1}, "mmdet maps by the file's order, so the warning is true"


def test_train_and_val_number_differently(make_coco, make_config):
    """A category missing from the val file alone would make mmdet compare the wrong classes."""
    root = make_coco(images=1, names=["a", "b", "c"])
    edit(root, lambda content: content["categories"].pop(0), "annotations/instances_val2017.json")
    cfg = make_config(root, classes=("a", "b", "c"))
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = message(cfg)
    assert "from label 0 on" in said and "same list of categories" in said


def test_single_string_as_classes(coco_root, make_config):
    """classes=('cat') is a string, which mmdet would compare letter by letter."""
    assert "('cat',)" in message(make_config(coco_root, classes="cat"))


def test_every_head_size_is_compared(coco_root, make_config):
    """All heads are named at once, with the options that set them; lists of heads (Cascade R-CNN) too."""
    said = message(make_config(coco_root, classes=("person", "car")))
    for head in ("bbox_head", "mask_head"):
        assert f"model.roi_head.{head}.num_classes=80" in said and f"model.roi_head.{head}.num_classes=2" in said
    cascade = dict(rpn_head=dict(num_classes=1), roi_head=dict(bbox_head=[dict(num_classes=3), dict(num_classes=4)]))
    with pytest.raises(InputError, match=r"model\.roi_head\.bbox_head\.1\.num_classes=4\. Set"):
        checks.check_head_sizes(cascade, 3, where="train data set")
    with pytest.raises(InputError, match=r"model\.bbox_head\.num_classes=80"):
        checks.check_head_sizes(dict(type="RetinaNet", bbox_head=dict(num_classes=80)), 3, where="train data set")


def test_no_object_left(make_coco, make_config):
    """Annotations that belong to no image or no category leave nothing to train on."""
    root = make_coco(images=2)
    edit(root, lambda content: [a.update(image_id=99) for a in content["annotations"]])
    assert "no image has an annotation" in message(make_config(root))
    edit(root, lambda content: [a.update(image_id=1, category_id=999) for a in content["annotations"]])
    assert "check category_id" in message(make_config(root))


def test_all_images_too_small(make_coco, make_config):
    """The default filter drops images below 32 pixels: mmdet would fail in numpy."""
    root = make_coco(images=2)
    edit(root, lambda content: [image.update(height=20) for image in content["images"]])
    cfg = make_config(root)
    said = message(cfg)
    assert "all images are filtered out" in said and "32 pixels" in said and "filter_cfg.min_size" in said
    with pytest.raises(ValueError, match="at least one array"):
        built(cfg)


def test_wrapped_data_sets_are_checked(coco_root, make_config):
    """Repeated and concatenated data sets are looked into."""
    cfg = make_config(coco_root)
    good, bad = cfg.train_dataloader.dataset.to_dict(), cfg.train_dataloader.dataset.to_dict()
    bad["ann_file"] = "annotations/none.json"
    cfg.train_dataloader.dataset = dict(
        type="RepeatDataset", times=2, dataset=dict(type="ConcatDataset", datasets=[good, bad])
    )
    assert "none.json" in message(cfg)


@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(batch_size=0), "batch_size=0"),
        (dict(batch_size="2"), "batch_size='2'"),
        (dict(num_workers=-1), "num_workers=-1"),
        (dict(num_workers=0, persistent_workers=True), "persistent_workers=False"),
    ],
)
def test_loader_values(change, expected, coco_root, make_config):
    """Batch sizes and workers that torch refuses later are refused at once."""
    cfg = make_config(coco_root)
    cfg.train_dataloader.update(change)
    assert expected in message(cfg)


def test_missing_images_are_counted(make_coco, make_config):
    """The first missing files are named, and how many there are."""
    root = make_coco(images=6)
    for index in (1, 4, 5):
        (root / f"train2017/{index:06}.jpg").unlink()
    with pytest.raises(InputError, match=r"3 of 6 images .* first .*000001\.jpg, .*000004\.jpg, .*000005\.jpg"):
        images.check_images_exist(built(make_config(root)), "train")


def test_objects_are_counted(make_coco, make_config):
    """A built training set without one object of its classes is refused."""
    root = make_coco(images=2)
    cfg = make_config(root)
    cfg.train_dataloader.dataset.filter_cfg = None
    images.check_objects(built(cfg), "train")
    edit(root, lambda content: content.update(annotations=[]))
    with pytest.raises(InputError, match="none of the 2 images"):
        images.check_objects(built(cfg), "train")


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("content", ["missing", "empty", "text", "half"])
def test_unreadable_image_is_named(content, suffix, make_coco, make_config):
    """An image that is missing, no image, or half there ends the run with its name.

    Half an image is the silent one: decoders that fill up the rest let mmdet train on it.
    """
    root = make_coco(images=1)
    noise = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    path = root / f"train2017/000000.{suffix}"
    cv2.imwrite(str(path), noise)
    edit(root, lambda data: data["images"][0].update(file_name=path.name))
    dataset = built(make_config(root))
    images.name_image_errors(dataset)
    assert dataset[0]["inputs"].shape[0] == 3, "the whole file loads through the wrapper"
    whole = path.read_bytes()
    path.unlink()
    if content != "missing":
        path.write_bytes({"empty": b"", "text": b"not an image", "half": whole[: len(whole) // 2]}[content])
    with pytest.raises(InputError) as caught:
        dataset[0]
    reason = dict(missing="does not exist", empty="is empty", text="failed to load image", half="is cut off")[content]
    assert f"image {path} cannot be read" in str(caught.value) and reason in str(caught.value)


def test_bytes_behind_the_end_marker_are_no_harm(make_coco, make_config):
    """Cameras append data behind a JPEG's end marker; such files are whole."""
    root = make_coco(images=1)
    path = root / "train2017/000000.jpg"
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert images.fault_of(str(path)) is None
