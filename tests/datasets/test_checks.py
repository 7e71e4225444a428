"""Data sets are checked before a run: each way of being broken has one message with the value and the remedy."""

import json
import os
import warnings
from pathlib import Path

import pytest

from mrla_mm.datasets import checks, coco_file
from mrla_mm.datasets.class_folders import missing_folder
from mrla_mm.errors import InputError

from .conftest import TRAIN, VAL, built, edit, message


def test_intact_set_passes(coco_root, make_config):
    """An intact set with COCO's classes raises nothing and warns of nothing."""
    cfg = make_config(coco_root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.check_datasets(cfg, ("train", "val"))


def test_missing_set_says_where_and_how(tmp_path, make_config):
    """Nothing at data_root: the message has the path, what is there instead, and both ways to put it right."""
    (tmp_path / "something").touch()
    (tmp_path / "COCO").mkdir()
    said = message(make_config(tmp_path / "coco"))
    assert f"{tmp_path}/coco/{TRAIN} does not exist" in said
    assert f"there is no {tmp_path}/coco (did you mean 'COCO' for 'coco'?)" in said and "something" not in said
    assert "ln -s" in said and "data_root=" in said
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco/Annotations").mkdir()
    assert f"{tmp_path}/coco exists and holds ['Annotations']" in message(make_config(tmp_path / "coco"))


@pytest.mark.parametrize("root", [["a/", "b/"], dict(train="a/"), 5, "", "dat"])
def test_a_variable_called_data_root_moves_nothing(root, tmp_path, make_config):
    """It may be anything; the remedy is the data set's own key then."""
    cfg = make_config(tmp_path / "none")
    cfg.data_root, cfg.train_dataloader.dataset.data_root = root, "data/nowhere"
    assert "--cfg-options train_dataloader.dataset.data_root=/path/to/set" in message(cfg)


@pytest.mark.parametrize(
    ("own", "remedy", "but"),
    [
        (dict(data_root="{0}/sets/"), "or set its place: --cfg-options data_root=/path/to/set", "Correct"),
        (
            dict(data_root="{0}/other"),
            "ln -s /path/to/set {0}/other), or set its place: --cfg-options {1}.data_root=",
            " data_",
        ),
        (
            dict(data_root="{0}/mine", ann_file="a.json"),
            "Correct {1}.ann_file, which is seen from its data_root {0}/mine",
            "ln",
        ),
        (dict(data_root="{0}/mine", ann_file="a.json"), "--cfg-options {1}.data_root=/path/to/set", "ln -s"),
        (dict(data_root="{0}/sets/", ann_file="{0}/mine/a.json"), "Correct {1}.ann_file", "--cfg-options"),
        (
            dict(data_root="{0}/deep", ann_file="a/x.json"),
            "It is in {0}/deep/set: --cfg-options {1}.data_root={0}/deep/set",
            "/path",
        ),
        (dict(data_root=None, ann_file="nowhere/a.json"), "Correct {1}.ann_file", "--cfg-options"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_remedy_fits_the_place_that_the_config_names(wrapped, own, remedy, but, tmp_path, make_config):
    """The option `data_root` for what it moves; otherwise the data set's own keys, inside wrappers too."""
    cfg, path = make_config(tmp_path), "train_dataloader.dataset"
    cfg.data_root = f"{tmp_path}/sets/"
    (tmp_path / "mine").mkdir()
    (tmp_path / "deep/set/a").mkdir(parents=True)
    (tmp_path / "deep/set/a/x.json").touch()
    dataset = cfg.train_dataloader.dataset
    dataset.update({key: value and value.format(tmp_path) for key, value in own.items()})
    if wrapped:
        cfg.train_dataloader.dataset, path = dict(type="RepeatDataset", times=2, dataset=dataset), f"{path}.dataset"
    said = message(cfg)
    assert remedy.format(tmp_path, path) in said and but not in said.partition("). ")[2]


@pytest.mark.parametrize("task", ["detection", "classification"])
def test_a_root_that_is_nowhere_lists_nothing(task, make_config):
    """What lies in the root of the file system is nobody's business, near as it may be."""
    if task == "detection":
        said = message(make_config(Path("/nowhere_at_all")))
        assert "nothing of /nowhere_at_all/annotations exists" in said
    else:
        said = missing_folder(Path("/nowhere_at_all/train"), "train", "data_root")
        assert "nothing of /nowhere_at_all exists" in said
    assert not any(f"'{entry}'" in said for entry in os.listdir("/"))


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
        (b'{"images": [], "annotations": [], "categories": [3]}', "categories[0] lacks ['id', 'name']"),
    ],
)
def test_broken_annotation_file(content, expected, make_coco, make_config):
    """Whatever the file is instead of a COCO annotation file is named with its path."""
    root = make_coco(images=1)
    (root / TRAIN).write_bytes(content)
    said = message(make_config(root))
    assert expected in said and str(root / TRAIN) in said


@pytest.mark.parametrize(
    "key, change, expected",
    [
        ("annotations", dict(area=None), "annotations[1] has area=None; it must be a number"),
        ("annotations", dict(bbox=None), "annotations[1] has bbox=None; it must be [x, y, width, height]"),
        ("annotations", dict(bbox=[1, 2, 3]), "annotations[1] has bbox=[1, 2, 3]"),
        ("annotations", dict(bbox=["1", "2", "3", "4"]), "annotations[1] has bbox=['1', '2', '3', '4']"),
        ("annotations", dict(bbox=[1, 2, 3, float("nan")]), "annotations[1] has bbox=[1, 2, 3, nan]"),
        ("annotations", dict(image_id=[1]), "annotations[1] has image_id=[1], which is no id"),
        ("annotations", dict(id=1), "two of its annotations have the id 1"),
        ("images", dict(width=None), "images[1] has width=None"),
        ("images", dict(height=0), "height=0"),
        ("images", dict(file_name=3), "images[1] has file_name=3"),
        ("images", dict(id=1), "two of its images have the id 1"),
    ],
)
@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_values_that_mmdet_ends_on_are_named(split, key, change, expected, make_coco, make_config):
    """Each entry has the kind of values that mmdet and pycocotools reckon with."""
    root, name = make_coco(images=2), f"annotations/instances_{split}.json"
    edit(root, lambda content: content[key][1].update(change), name)
    said = message(make_config(root))
    assert expected in said and str(root / name) in said


def test_an_area_is_needed(make_coco, make_config):
    """Many converters write no area; mmdet ends on a KeyError without a file's name."""
    root = make_coco(images=1)
    edit(root, lambda content: content["annotations"][0].pop("area"))
    assert "annotations[0] lacks ['area']" in message(make_config(root))
    with pytest.raises(KeyError, match="area"):
        built(make_config(root))


@pytest.mark.parametrize("mask", [None, [], "polygon"])
def test_masks_are_needed_where_they_are_loaded(mask, make_coco, make_config):
    """A set of boxes alone cannot train Mask R-CNN, and can train the others."""
    root = make_coco(images=2)
    edit(root, lambda content: content["annotations"][2].update(segmentation=mask))
    said = message(make_config(root))
    assert f"annotations[2] has segmentation={mask!r}" in said and "faster_rcnn_*" in said
    edit(root, lambda content: content["annotations"][2].update(area=0))
    checks.check_datasets(make_config(root), ("train",))  # mmdet leaves the object out
    edit(root, lambda content: [a.pop("segmentation") for a in content["annotations"]])
    cfg = make_config(root)
    cfg.train_dataloader.dataset.pipeline = [dict(type="LoadAnnotations", with_bbox=True)]
    checks.check_datasets(cfg, ("train",))


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


@pytest.mark.parametrize(
    "given, names, hint",
    [
        (("Person", "car"), ["person", "car"], "did you mean 'person' for 'Person'?"),
        (("person ", "car"), ["person", "car"], "did you mean 'person' for 'person '?"),
        (("cellphone", "car"), ["cell phone", "car"], "did you mean 'cell phone' for 'cellphone'?"),
        (("persn", "car"), ["person", "car"], "did you mean 'person' for 'persn'?"),
        (("parson", "car"), ["person", "car"], "did you mean 'person' for 'parson'?"),
        (("cat", "car"), ["truck", "car"], None),
        (("Cat", "Dog"), ["cat", "dog"], "did you mean 'cat' for 'Cat', 'dog' for 'Dog'?"),
    ],
)
def test_near_misses_of_names_are_named(given, names, hint):
    """A name that differs in case, spaces or a letter is an error; others give a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checks.check_categories(names, given, Path("a.json"))
            said, refused = str(caught[0].message), False
        except InputError as error:
            said, refused = str(error), True
    assert refused is (given[0] != "cat")
    assert hint in said if hint else "did you mean" not in said


@pytest.mark.parametrize(
    "one, other",
    [
        ("class_1", "class_2"),
        ("speed limit 30", "speed limit 80"),
        ("grade A+", "grade A-"),
        ("grade_a", "grade_b"),
        ("with_mask", "without_mask"),
        ("Safety Vest", "NO-Safety Vest"),
        ("male_face", "female_face"),
        ("ripe tomato", "unripe tomato"),
        ("typical", "atypical"),
        ("traffic light red", "traffic light green"),
        ("car", "cart"),
        ("人行道交通信号红灯", "人行道交通信号绿灯"),
    ],
)
def test_other_classes_of_like_names_are_no_misspelling(one, other):
    """A set may well lack one class and have another which this config leaves out."""
    for missing, unused in ((one, other), (other, one)):
        with pytest.warns(UserWarning, match="has no category for 1 of 2 classes"):
            assert checks.check_categories([unused, "person"], (missing, "person"), Path("a.json")) == ["person"]


@pytest.mark.parametrize(
    "one, other",
    [
        ("dining_table", "dining table"),
        ("T-Shirt", "tshirt"),
        ("trucks", "truck"),
        ("license_plate", "licence_plate"),
        ("perosn", "person"),
        ("motocycle", "motorcycle"),
    ],
)
def test_other_spellings_of_a_name_are_refused(one, other):
    for missing, unused in ((one, other), (other, one)):
        with pytest.raises(InputError, match=f"did you mean '{unused}' for '{missing}'"):
            checks.check_categories([unused, "x"], (missing, "x"), Path("a.json"))


def test_an_evaluation_file_without_images_is_refused(make_coco, make_config):
    """mmdet ends on numpy's concatenate, after the training data is loaded; so does a test."""
    root = make_coco(images=1)
    edit(root, lambda content: content.update(images=[], annotations=[]), VAL)
    cfg = make_config(root)
    assert f"val data: annotation file {root / VAL} lists no images" in message(cfg)
    with pytest.raises(ValueError, match="at least one array"):
        built(cfg, "val")


def test_missing_images_are_found_before_anything_is_built(make_coco, make_config):
    """Count and first names, for every phase; images that mmdet leaves out, or may, are not asked for."""
    root = make_coco(images=6)
    for split, numbers in (("train2017", (1, 4)), ("val2017", (2,))):
        for number in numbers:
            (root / f"{split}/{number:06}.jpg").unlink()
    cfg = make_config(root)
    said = message(cfg)
    assert f"train data: 2 of 6 images listed in {root / TRAIN} do not exist" in said
    assert f"first {root}/train2017/000001.jpg, {root}/train2017/000004.jpg" in said
    edit(root, lambda content: [a.update(image_id=1) for a in content["annotations"] if a["image_id"] in (2, 5)])
    assert "val data: 1 of 6 images" in message(cfg)
    assert len(built(cfg)) == 4, "mmdet leaves out the two images without objects, so nothing is missing"
    cfg.val_dataloader.dataset.indices = 2
    checks.check_datasets(cfg, ("train", "val"))


@pytest.mark.parametrize("method", ["parse_data_info", "filter_data"])
def test_a_subclass_finds_its_images_itself(method, make_coco, make_config):
    """Names in the file say nothing about a data set that reads other files, or leaves out what is not there."""
    from mmdet.datasets import CocoDataset

    root = make_coco(images=2)
    edit(root, lambda content: [image.update(file_name="elsewhere") for image in content["images"]])
    own = type("Own", (CocoDataset,), {method: lambda self, *args: None})
    cfg = make_config(root)
    assert "images listed in" in message(cfg)
    cfg.train_dataloader.dataset.type = own
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


@pytest.mark.parametrize("classes", [3, ()])
def test_classes_that_are_no_names(classes, coco_root, make_config):
    """Neither a number of classes nor an empty list names any."""
    assert f"metainfo.classes={classes!r} must be a tuple" in message(make_config(coco_root, classes=classes))


def test_every_head_size_is_compared(coco_root, make_config):
    """All heads are named at once, with the options that set them; lists of heads (Cascade R-CNN) too."""
    said = message(make_config(coco_root, classes=("person", "car")))
    for head in ("bbox_head", "mask_head"):
        assert f"model.roi_head.{head}.num_classes=80" in said and f"model.roi_head.{head}.num_classes=2" in said
    cascade = dict(rpn_head=dict(num_classes=1), roi_head=dict(bbox_head=[dict(num_classes=3), dict(num_classes=4)]))
    with pytest.raises(
        InputError, match=r"model\.roi_head\.bbox_head\.1\.num_classes=4: set --cfg-options.* or name your classes"
    ):
        checks.check_head_sizes(cascade, 3, phase="train")
    with pytest.raises(InputError, match=r"model\.bbox_head\.num_classes=80"):
        checks.check_head_sizes(dict(type="RetinaNet", bbox_head=dict(num_classes=80)), 3, phase="train")
    with pytest.raises(
        InputError, match=r"^the val data set has 80 .*num_classes=3: give val_dataloader\.dataset\.metainfo"
    ):
        checks.check_head_sizes(dict(type="RetinaNet", bbox_head=dict(num_classes=3)), 80, phase="val")


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
