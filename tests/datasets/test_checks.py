"""Data sets are checked before a run: what mmdet would get wrong without a word is an error or a line in the log."""

import copy
import json
import logging
import sys
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, HOOKS, init_default_scope
from torch import nn

from mrla_mm.errors import InputError

from ..conftest import ROOT, tiny_options, write_class_folders

ABC = ["a", "b", "c"]
TRAIN, VAL = (f"annotations/instances_{split}.json" for split in ("train2017", "val2017"))


def edit(root, change, name=TRAIN):
    """Change the content of an annotation file."""
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def make_config():
    """Return `make(root, **metainfo)`: the Mask R-CNN config on the set at `root`."""
    original = Config.fromfile(ROOT / "configs/mask_rcnn_r50_mrla_light_1x.py")

    def make(root, **metainfo):
        cfg = copy.deepcopy(original)
        for phase in ("train", "val"):
            cfg[f"{phase}_dataloader"].dataset.update(data_root=str(root), metainfo=metainfo)
        return cfg

    return make


@pytest.fixture
def check(caplog):
    """Return `check(cfg, num_classes)`: build the data sets, run the hook, and return what it logged."""
    logger = logging.getLogger("test")
    caplog.set_level(logging.INFO, "test")

    def run(cfg, num_classes=80, scope="mmdet"):
        init_default_scope(scope)
        heads = dict(rpn_head=nn.Module(), roi_head=nn.ModuleDict(dict(bbox_head=nn.Module())))
        heads["rpn_head"].num_classes, heads["roi_head"].bbox_head.num_classes = 1, num_classes
        loops = {}
        for phase in ("train", "val"):
            dataset = DATASETS.build(cfg[f"{phase}_dataloader"].dataset)
            loops[f"_{phase}_loop"] = SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
        runner = SimpleNamespace(
            model=nn.ModuleDict(heads), logger=logger, _test_loop=None, **loops
        )
        HOOKS.build(dict(type="DatasetCheckHook")).before_run(runner)
        return caplog.text

    return run


def test_intact_set_passes_without_a_word(coco_root, make_config, check):
    assert check(make_config(coco_root)) == ""


def test_missing_and_empty_images_are_counted_and_the_first_is_named(make_coco, make_config, check):
    """OpenCV's error for an empty file has no name in it."""
    root = make_coco(images=4)
    (root / "train2017/000001.jpg").write_bytes(b"")
    (root / "train2017/000003.jpg").unlink()
    cfg = make_config(root)
    wrapped = dict(type="ConcatDataset", datasets=[cfg.train_dataloader.dataset.to_dict()])
    cfg.train_dataloader.dataset = dict(type="RepeatDataset", times=2, dataset=wrapped)
    with pytest.raises(InputError, match=r"2 of 4 images .*000001\.jpg"):
        check(cfg)


@pytest.mark.parametrize("classes", [("a", "b", "C"), ("a", "b", "c", "d")])
def test_a_class_that_the_file_lacks_is_refused(classes, make_coco, make_config, check):
    """mmdet would drop it, and number the classes behind it anew; another order is in the log alone."""
    root = make_coco(images=1, names=ABC)
    with pytest.raises(InputError, match=f"'{classes[-1]}'"):
        check(make_config(root, classes=classes), len(classes))
    assert "order" in check(make_config(root, classes=("b", "a", "c")), 3)


def test_files_that_number_their_classes_differently_are_refused(make_coco, make_config, check):
    root = make_coco(images=1, names=ABC)
    edit(root, lambda content: content["categories"].reverse(), VAL)
    with pytest.raises(InputError, match="differently"):
        check(make_config(root, classes=tuple(ABC)), 3)


def test_heads_need_the_number_of_classes(make_coco, make_config, check):
    cfg = make_config(make_coco(images=1, names=ABC), classes=tuple(ABC))
    check(cfg, 3)
    with pytest.raises(InputError, match=r"3 classes.*roi_head\.bbox_head\.num_classes=80"):
        check(cfg, 80)


def test_a_set_without_any_object_is_refused(make_coco, make_config, check):
    root = make_coco(images=2)
    edit(root, lambda content: [one.update(category_id=999) for one in content["annotations"]])
    cfg = make_config(root)
    cfg.train_dataloader.dataset.filter_cfg = None
    with pytest.raises(InputError, match="no image has an object"):
        check(cfg)
    background = cfg.train_dataloader.dataset.to_dict()
    objects = dict(background, ann_file=VAL, data_prefix=dict(img="val2017/"))
    cfg.train_dataloader.dataset = dict(type="ConcatDataset", datasets=[background, objects])
    check(cfg)


def test_skipped_objects_are_counted_by_reason(make_coco, make_config, check):
    root = make_coco(images=6)  # with two objects each

    def spoil(content):
        entries = content["annotations"]
        entries[0].update(image_id=99)
        entries[1].update(bbox=[5, 5, 0.5, 9])
        entries[2].update(bbox=[500, 5, 9, 9])
        entries[3].update(iscrowd=1)
        entries[4].update(category_id=999)
        content["images"][3].update(height=20)

    edit(root, spoil)
    said = check(make_config(root))
    assert "skips 7 of 12 objects" in said
    for reason in (
        "1 on images that",
        "1 smaller",
        "1 outside",
        "1 crowds",
        "1 of other",
        "2 on images smaller",
    ):
        assert reason in said


def test_class_folders_of_training_and_validation_must_be_the_same(tmp_path, check):
    root = write_class_folders(tmp_path / "set")
    dataset = dict(type="mmpretrain.CustomDataset", data_root=str(root), pipeline=[])
    cfg = Config(
        {
            f"{phase}_dataloader": dict(dataset=dict(dataset, data_prefix=phase))
            for phase in ("train", "val")
        }
    )
    assert check(cfg, 3, "mmpretrain") == ""
    (root / "val/cat").rename(root / "val/zebra")
    with pytest.raises(InputError, match="differently"):
        check(cfg, 3, "mmpretrain")


def test_a_run_parses_each_annotation_file_once(make_coco, run_tool, tmp_path, monkeypatch):
    """Counted over a whole tiny training; the host's own reading goes through other modules."""
    root, parsed, original = make_coco(images=2), [], json.load

    def counting(file, *args, **kwargs):
        if sys._getframe(1).f_globals["__name__"].startswith("mrla_mm"):
            parsed.append(file.name)
        return original(file, *args, **kwargs)

    monkeypatch.setattr(json, "load", counting)
    monkeypatch.chdir(tmp_path)
    options = tiny_options("retinanet_r50", root, "train_cfg.max_epochs=1")
    code, err = run_tool(
        "train", ROOT / "configs/retinanet_r50_mrla_light_1x.py", "--cfg-options", *options
    )
    assert code == 0, err
    assert sorted(parsed) == [str(root / TRAIN), str(root / VAL)]
