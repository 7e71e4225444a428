"""The check of data before a run: each fault is one line that names it, real data give none."""

import copy
import functools
import json
import math
import re
from types import SimpleNamespace

import pytest
from mmdet.datasets import CocoDataset
from mmdet.models.roi_heads import FCNMaskHead
from mmengine.config import Config
from mmengine.registry import DATASETS, HOOKS, init_default_scope
from mmengine.runner import BaseLoop
from PIL import Image
from torch import nn

from mrla_mm.datasets.checks import check_data
from mrla_mm.errors import InputError

from ..conftest import ROOT, tiny_options, write_class_folders, write_coco

ABC = ["a", "b", "c"]
TRAIN, VAL = (f"annotations/instances_{split}.json" for split in ("train2017", "val2017"))


def edit(root, change, name=TRAIN):
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


class Loop(BaseLoop):
    run = None


@functools.cache
def mask_rcnn():
    return Config.fromfile(ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py")


def make_config(root, classes=ABC):
    cfg = copy.deepcopy(mask_rcnn())
    data = dict(data_root=str(root), metainfo=dict(classes=classes))
    for phase in ("train", "val"):
        cfg[f"{phase}_dataloader"].dataset.update(copy.deepcopy(data))
    cfg.val_evaluator.ann_file = str(root / VAL)
    return cfg


def make_runner(cfg, num_classes=3, scope="mmdet"):
    init_default_scope(scope)
    heads = dict(rpn_head=nn.Module(), bbox_head=nn.ModuleList([nn.Module()]))  # as in a cascade
    heads["rpn_head"].num_classes, heads["bbox_head"][0].num_classes = 1, num_classes
    return SimpleNamespace(cfg=cfg, model=nn.ModuleDict(heads))


def faults(cfg, **options):
    try:
        check_data(make_runner(cfg, **options), "train", "val")
    except InputError as error:
        return str(error).splitlines()
    return []


@pytest.fixture
def root(tmp_path):
    return write_coco(tmp_path / "coco", images=6, names=ABC)


def each_annotation(step=1, **values):
    return lambda content: [one.update(values) for one in content["annotations"][::step]]


def without(kind, key):
    return lambda content: content[kind][0].pop(key)


def to_corners(content):
    for one in content["annotations"]:
        x, y, width, height = one["bbox"]
        one["bbox"] = [x, y, x + width, y + height]


def from_zero(content):
    for category in content["categories"]:
        category["id"] -= 1


FAULTS = {
    "another class": (lambda c: c["categories"][2].update(name="C"), r"no 'c' .*'a', 'b', 'C'"),
    "class order": (lambda c: c["categories"].reverse(), r"\['c', 'b', 'a'\]"),
    "off by one": (from_zero, r"category_id 3, .* 0, 1, 2"),
    "no masks": (lambda c: c["annotations"][3].update(segmentation=[]), "without segmentation"),
    "corners": (to_corners, r"\[x1, y1, x2, y2\]"),
    "no area": (without("annotations", "area"), r"annotations\[0\].*'area'"),
    "no box": (lambda c: c["annotations"][3].update(bbox=[]), r"annotation 4 .*bbox=\[\]"),
    "a text for a box": (each_annotation(bbox="1 2 3 4"), r"annotations\[0\].*'1 2 3 4'"),
    "no file": (lambda c: c["images"][2].update(file_name=None), r"images\[2\].*file_name=None"),
    "no flag": (each_annotation(iscrowd=None), "iscrowd=None"),
    "text for a category": (
        lambda c: [each.update(id=str(each["id"])) for each in c["categories"]],
        r"category_id \d, .*'1', '2', '3'",
    ),
    "an annotation's id twice": (lambda c: c["annotations"][3].update(id=1), "two .*id 1"),
    "polygons of two points": (each_annotation(segmentation=[[1, 2, 3, 4]]), "12 of 12"),
    "polygons of an odd number": (each_annotation(segmentation=[list(range(2, 9))]), "12 of 12"),
    "polygons in 0 to 1": (each_annotation(3, segmentation=[[0, 0.5, 1, 0.5, 1, 1]]), "4 of 12"),
    "run lengths without size": (each_annotation(segmentation=dict(counts="1")), "12 of 12"),
    "crowds alone": (each_annotation(iscrowd=1), "no training image"),
    "ignored alone": (each_annotation(ignore=1), "no training image"),
    "small images": (lambda c: [each.update(height=20) for each in c["images"]], "no training"),
    "tiny": (each_annotation(bbox=[5, 5, 0.5, 9]), r"12 of 12 .*0\.5"),
    "flat": (each_annotation(area=0), "12 of 12 .*area=0"),
    "outside": (each_annotation(2, bbox=[500, 5, 9, 9]), "6 of 12 .*500"),
    "not a number": (lambda c: c["annotations"][3].update(bbox=[math.nan] * 4), "nan.* image 2"),
    "text for a number": (each_annotation(image_id="1"), "12 of 12 .*'1', but .* 1:"),
    "no such image": (each_annotation(image_id=9), "12 of 12 .*9, but .* 1:"),
    "an id twice": (lambda c: c["images"].append(c["images"][0]), "two images have the id 1"),
    "a name twice": (lambda c: c["categories"].append(dict(id=9, name="a")), "two .*'a'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_file_is_one_line(fault, root):
    change, message = FAULTS[fault]
    edit(root, change)
    (line,) = faults(make_config(root))
    assert re.search(message, line)
    assert line.startswith("no training image") or str(root / TRAIN) in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"[]", "list"), (b"\xef\xbb\xbf{}", "BOM")],
)
def test_a_file_that_mmdet_cannot_read_is_one_line(content, expected, root):
    (root / TRAIN).write_bytes(content)
    (line,) = faults(make_config(root))
    assert str(root / TRAIN) in line and expected in line


def test_what_mmdet_skips_or_never_reads_is_no_fault(root):
    def change(content):
        first, second, third, *others = content["annotations"]
        for one in [second, third, *others]:
            one["bbox"] = [0, 0, 20, 20]
        first["bbox"] = [30, 5, 90, 9]
        second["image_id"] = 99
        third["area"] = 0
        unlearned = dict(others[0], id=99, category_id=3, segmentation=[])
        del unlearned["iscrowd"]
        content["annotations"].append(unlearned)
        third["segmentation"] = []

    for name in (TRAIN, VAL):
        edit(root, change, name)
        edit(root, lambda c: [one.update(category_id=1) for one in c["annotations"][:-1]], name)
    assert faults(make_config(root, ["a", "b"]), num_classes=2) == []


def oversized(content):
    images = {image["id"]: image for image in content["images"]}
    for one in content["annotations"]:
        image = images[one["image_id"]]
        one["bbox"] = [1, 1, image["width"] + 1, image["height"] + 1]


TOLERATED = {
    "boxes a bit larger than their images": oversized,
    "a category taken out": lambda c: c["annotations"][3].update(category_id=99),
    "a polygon of two points": lambda c: c["annotations"][3].update(segmentation=[[1, 2, 3, 4]]),
    "run lengths": each_annotation(segmentation=dict(counts=[9, 9, 999], size=[64, 96])),
}


@pytest.mark.parametrize("case", TOLERATED)
def test_data_that_mmdet_trains_on_are_no_fault(case, root):
    edit(root, TOLERATED[case])
    assert faults(make_config(root)) == []


class OwnReader(CocoDataset):
    parse_data_info = None


def test_what_a_subclass_reads_and_heads_for_any_class_are_left_to_them(root):
    edit(root, without("annotations", "area"))
    cfg = make_config(root)
    cfg.train_dataloader.dataset.type = OwnReader
    runner = make_runner(cfg)
    runner.model["mask_head"] = FCNMaskHead(num_classes=1, class_agnostic=True)
    check_data(runner, "train")


def test_a_run_is_checked_once_and_some_not_at_all(root):
    cfg = make_config(root / "nowhere")
    runner = make_runner(cfg)
    with pytest.raises(InputError):
        check_data(runner, "train")
    check_data(runner, "train")
    cfg.check_data = False
    assert faults(cfg) == []
    cfg = make_config(root)  # videos and remote files are left to mmdet
    cfg.val_dataloader = None
    dataset = cfg.train_dataloader.dataset
    for files in (dict(ann_file="s3://a.json"), dict(backend_args=dict(backend="petrel"))):
        cfg.train_dataloader.dataset = dict(dataset, data_root="", data_prefix={}, **files)
        assert faults(cfg) == []
    cfg.train_dataloader.dataset = dict(type="MOTChallengeDataset", ann_file="none.json")
    assert faults(cfg, num_classes=80) == []


def test_wrapped_data_sets_are_checked(root):
    edit(root, without("annotations", "area"))
    cfg = make_config(root)
    data = cfg.train_dataloader.dataset.to_dict()
    wrapped = dict(type="ClassBalancedDataset", oversample_thr=0.1, dataset=data)
    wrapped = dict(type="MultiImageMixDataset", pipeline=[], dataset=wrapped)
    wrapped = dict(type="ConcatDataset", datasets=[wrapped])
    cfg.train_dataloader.dataset = dict(type="RepeatDataset", times=2, dataset=wrapped)
    (line,) = faults(cfg)
    assert "'area'" in line


def test_missing_files_and_forgotten_classes_are_told_of_both_sets(root):
    for cfg, message in (
        (make_config(root / "nowhere"), r"nowhere/annotations/instances_\w+\.json.*: correct"),
        (make_config(root, "a"), r"write \('a',\)"),
        (make_config(root, ["d", "e", "f"]), r"no 'd' \(3 of 3 .*'a'"),
    ):
        assert len([line for line in faults(cfg) if re.search(message, line)]) == 2


def test_data_sets_must_number_their_classes_alike(root):
    cfg = make_config(root)
    edit(root, lambda content: content["categories"].reverse(), VAL)
    cfg.val_dataloader.dataset.metainfo.classes = ["c", "b", "a"]
    (line,) = faults(cfg)
    assert "numbers classes differently" in line and str(root / VAL) in line


def test_heads_need_the_number_of_classes(root):
    cfg = make_config(root)
    lines = faults(cfg, num_classes=80)
    assert len(lines) == 2 and "3 classes, but the model bbox_head.0.num_classes" in lines[0]
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.dataset.metainfo.thing_classes = ["a"]  # panoptic heads count stuff apart
    assert faults(cfg, num_classes=80) == []


def test_the_evaluator_reads_the_file_of_the_data_set(root):
    cfg = make_config(root)
    cfg.val_evaluator.ann_file = str(root / TRAIN)
    (line,) = faults(cfg)
    assert str(root / VAL) in line and str(root / TRAIN) in line
    cfg.val_evaluator = [dict(type="CocoMetric", ann_file=str(root / "train2017/.." / VAL))]
    assert faults(cfg) == []
    for fault in (without("annotations", "iscrowd"), lambda c: c["annotations"][1].update(id=0)):
        edit(root, fault, VAL)
    (line, other) = faults(cfg)
    assert "iscrowd" in line and "id=0" in other


def test_background_beside_one_object_is_no_fault(root):
    edit(root, lambda content: content["annotations"].clear())
    edit(root, lambda c: [one.update(iscrowd=1) for one in c["annotations"][1:]], VAL)
    cfg = make_config(root)
    background = cfg.train_dataloader.dataset.to_dict()
    objects = dict(background, ann_file=VAL, data_prefix=dict(img="val2017/"))
    cfg.train_dataloader.dataset = dict(type="ConcatDataset", datasets=[background, objects])
    assert faults(cfg) == []
    foreign = dict(type="LVISV1Dataset", metainfo=dict(classes=ABC), ann_file="none.json")
    cfg.train_dataloader.dataset.datasets = [background, foreign]
    assert faults(cfg) == []
    cfg.train_dataloader.dataset = background
    assert len(faults(cfg)) == 1


def test_class_folders_of_training_and_validation_must_be_the_same(tmp_path):
    root = write_class_folders(tmp_path / "set")
    dataset = dict(type="mmpretrain.CustomDataset", data_root=str(root))
    cfg = Config()
    for phase in ("train", "val"):
        cfg[f"{phase}_dataloader"] = dict(dataset=dict(dataset, data_prefix=phase))
    check = functools.partial(faults, cfg, scope="mmpretrain")
    assert check() == []
    cfg.train_dataloader.dataset.metainfo = dict(classes=["cat", "bird", "dog"])
    (line,) = check()
    assert "['bird', 'cat', 'dog']" in line
    cfg.train_dataloader.dataset.metainfo = dict(classes=["Pica", "Felis", "Canis"])
    assert check() == [], "names for people"
    (root / "val/cat").rename(root / "val/zebra")
    (line,) = check()
    assert line.startswith(f"{root}/val: ") and "numbers classes differently" in line


def built_loop(dataset):
    loop = object.__new__(Loop)
    loop.dataloader = SimpleNamespace(dataset=DATASETS.build(dataset))
    return loop


def run_hook(cfg, **loops):
    runner = make_runner(cfg)
    built = {f"_{name}_loop": loops.get(name) for name in ("train", "val", "test")}
    vars(runner).update(built)
    HOOKS.build(dict(type="DatasetCheckHook")).before_run(runner)


def test_the_hook_checks_the_loops_that_other_tools_have_built(root):
    edit(root, lambda content: content["categories"].reverse(), VAL)
    cfg = make_config(root)
    init_default_scope("mmdet")
    run_hook(cfg, train=built_loop(cfg.train_dataloader.dataset), val={})
    with pytest.raises(InputError, match="order"):
        run_hook(cfg, val=built_loop(cfg.val_dataloader.dataset))


IMAGES = {
    "missing": (lambda path: path.unlink(), "does not exist"),
    "not an image": (lambda path: path.write_bytes(b"<html>"), "cannot be read"),
    "smaller": (lambda path: Image.new("RGB", (24, 16)).save(path), r"24 x 16 .*96 x 64"),
}


@pytest.mark.parametrize("fault", IMAGES)
def test_a_few_images_of_every_data_set_are_opened(fault, root):
    change, message = IMAGES[fault]
    cfg = make_config(root)
    init_default_scope("mmdet")
    last = root / "val2017/000005.jpg"
    change(last)
    data = cfg.val_dataloader.dataset
    wrapped = dict(type="ConcatDataset", datasets=[cfg.train_dataloader.dataset, data])
    for dataset in (data, wrapped):
        with pytest.raises(InputError, match=message) as caught:
            run_hook(cfg, val=built_loop(dataset))
        assert str(last) in str(caught.value) and "\n" not in str(caught.value)
    cfg.check_data = False
    run_hook(cfg, val=built_loop(data))


def test_a_photo_that_lies_on_its_side_is_no_fault(root):
    """Its EXIF data turn it, and the annotations may state its size either way."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (96, 64)).save(root / "train2017/000000.jpg", exif=exif)
    cfg = make_config(root)
    init_default_scope("mmdet")
    run_hook(cfg, train=built_loop(cfg.train_dataloader.dataset))


def test_run_lengths_need_a_loading_step_that_reads_them(root):
    edit(root, each_annotation(segmentation=dict(counts=[9, 9, 999], size=[64, 96])))
    cfg = make_config(root)
    cfg.train_dataloader.dataset.pipeline[1].poly2mask = False
    (line,) = faults(cfg)
    assert "12 of 12" in line


@pytest.mark.parametrize("change", [dict(dataset=dict(indices=3)), dict(drop_last=True)])
def test_an_evaluation_of_a_part_is_refused_and_training_on_one_is_not(change, root):
    cfg = make_config(root)
    cfg.merge_from_dict(dict(train_dataloader=change))
    assert faults(cfg) == []
    cfg.merge_from_dict(dict(val_dataloader=change))
    assert len(faults(cfg)) == 1
    cfg.val_dataloader.dataset.type = OwnReader
    assert len(faults(cfg)) == 1
    cfg.val_evaluator = dict(type="VOCMetric")
    assert faults(cfg) == []


def test_tools_check_before_mmdet_reads(root, run_tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs/retinanet_r50_mrla_light_1x.py"
    options = tiny_options("retinanet_r50", root)
    for tool, more, file in (("train", [], TRAIN), ("test", ["no.pth"], VAL)):
        code, err = run_tool(tool, config, *more, "--cfg-options", *options)
        assert code == 2 and "no 'person' (80 of 80" in err and str(root / file) in err
