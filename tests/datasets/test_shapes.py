"""The generated data set: exact COCO, the same bytes every time, rebuilt when it is damaged."""

import json
import re

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mrla_mm.datasets.drawing import CLASSES
from mrla_mm.datasets.shapes import MANIFEST, generate_shapes, segmentation_of, uncompressed_rle
from mrla_mm.errors import InputError

SMALL = dict(num_train=26, num_val=6, size=128)


def contents(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "shapes"
    assert generate_shapes(root, **SMALL) is True
    return root


@pytest.fixture(scope="module", params=["train2017", "val2017"])
def coco(request, root):
    split = COCO(root / f"annotations/instances_{request.param}.json")
    split.folder = root / request.param
    return split


def test_layout_is_cocos(root):
    names = set(contents(root))
    assert {"annotations/instances_train2017.json", "annotations/instances_val2017.json", MANIFEST} <= names
    assert sum(bool(re.fullmatch(r"train2017/\d{12}\.jpg", name)) for name in names) == 26
    assert sum(bool(re.fullmatch(r"val2017/\d{12}\.jpg", name)) for name in names) == 6
    assert len(names) == 26 + 6 + 3


def test_masks_boxes_and_areas_agree(coco):
    for annotation in coco.dataset["annotations"]:
        mask = coco.annToMask(annotation)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        x, y, width, height = annotation["bbox"]
        assert (x, x + width) == (columns[0], columns[-1] + 1)
        assert (y, y + height) == (rows[0], rows[-1] + 1)
        assert annotation["area"] == mask.sum() == coco_mask.area(coco.annToRLE(annotation))
        if annotation["iscrowd"]:
            assert isinstance(annotation["segmentation"]["counts"], list)


def test_instances_share_no_pixel(coco):
    for image in coco.dataset["images"]:
        masks = [coco.annToMask(each) for each in coco.imgToAnns[image["id"]]]
        if masks:
            assert np.sum(masks, 0).max() == 1


def test_images_are_as_listed(coco):
    sizes = set()
    for image in coco.dataset["images"]:
        picture = cv2.imread(str(coco.folder / image["file_name"]))
        assert picture.shape == (image["height"], image["width"], 3)
        sizes.add(picture.shape)
    assert len(sizes) > 1


def test_ids_are_unique_over_both_splits(root):
    splits = [json.loads((root / f"annotations/instances_{s}.json").read_text()) for s in ("train2017", "val2017")]
    for kind in ("images", "annotations"):
        ids = [each["id"] for split in splits for each in split[kind]]
        assert len(set(ids)) == len(ids)
        assert min(ids) > 0
    assert splits[0]["categories"] == splits[1]["categories"]
    assert [each["name"] for each in splits[0]["categories"]] == list(CLASSES)


def test_there_are_all_kinds_of_content(root):
    split = COCO(root / "annotations/instances_train2017.json")
    annotations = split.dataset["annotations"]
    plain = [each for each in annotations if not each["iscrowd"]]
    assert {each["category_id"] for each in plain} == set(range(1, len(CLASSES) + 1))
    assert sum(each["iscrowd"] for each in annotations) == 3
    assert {type(each["segmentation"]) for each in plain} == {list, dict}
    assert any(each["area"] < 32**2 for each in plain)
    assert any(each["area"] >= 32**2 for each in plain)
    assert any(not split.imgToAnns[image] for image in split.getImgIds())


def test_large_objects_by_cocos_measure_occur(tmp_path):
    generate_shapes(tmp_path / "s", num_train=25, num_val=1, size=160)
    split = json.loads((tmp_path / "s/annotations/instances_train2017.json").read_text())
    assert any(each["area"] > 96**2 for each in split["annotations"] if not each["iscrowd"])


def test_pycocotools_scores_the_truth_perfectly(coco):
    results = [
        {**{key: each[key] for key in ("image_id", "category_id", "bbox")}, "score": 1.0, "segmentation": rle}
        for each in coco.dataset["annotations"]
        if not each["iscrowd"]
        for rle in [coco.annToRLE(each)]
    ]
    for kind in ("bbox", "segm"):
        evaluation = COCOeval(coco, coco.loadRes(json.loads(json.dumps(results, default=bytes.decode))), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(1.0)


def test_same_parameters_give_the_same_bytes(root, tmp_path):
    generate_shapes(tmp_path / "again", **SMALL)
    assert contents(tmp_path / "again") == contents(root)


def test_another_seed_gives_another_set_and_more_images_begin_alike(root, tmp_path):
    few = dict(num_train=3, num_val=1, size=128)
    generate_shapes(tmp_path / "few", **few)
    generate_shapes(tmp_path / "other", **few, seed=1)
    name = "train2017/000000000002.jpg"
    first, few_first, other = ((path / name).read_bytes() for path in (root, tmp_path / "few", tmp_path / "other"))
    assert first == few_first
    assert first != other


def damage_truncate(root):
    path = root / "annotations/instances_train2017.json"
    path.write_bytes(path.read_bytes()[:-100])


def damage_delete_image(root):
    next((root / "train2017").glob("*.jpg")).unlink()


def damage_pixels(root):
    path = next((root / "val2017").glob("*.jpg"))
    path.write_bytes(path.read_bytes()[::-1])


def damage_manifest(root):
    (root / MANIFEST).write_text('{"finger')


@pytest.mark.parametrize("damage", [damage_truncate, damage_delete_image, damage_pixels, damage_manifest])
def test_an_intact_set_is_kept_and_a_damaged_one_rebuilt(tmp_path, damage):
    few = dict(num_train=3, num_val=1, size=64)
    root = tmp_path / "shapes"
    generate_shapes(root, **few)
    before = contents(root)
    stamps = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert generate_shapes(root, **few) is False
    assert stamps == {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    damage(root)
    assert contents(root) != before
    assert generate_shapes(root, **few) is True
    assert contents(root) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_a_changed_parameter_rebuilds(tmp_path):
    root = tmp_path / "shapes"
    generate_shapes(root, num_train=3, num_val=1, size=64)
    assert generate_shapes(root, num_train=4, num_val=1, size=64) is True
    assert len(list((root / "train2017").iterdir())) == 4


def test_a_killed_run_leaves_nothing_that_counts(tmp_path, monkeypatch):
    root, few = tmp_path / "shapes", dict(num_train=3, num_val=1, size=64)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        calls = []

        def killed_at_the_second(*args):
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return True

        patch.setattr(cv2, "imwrite", killed_at_the_second)
        generate_shapes(root, **few)
    assert not root.exists()
    assert generate_shapes(root, **few) is True
    assert len(list((root / "train2017").iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_train2017.json").write_text("{}")
    with pytest.raises(InputError, match="not a generated data set"):
        generate_shapes(tmp_path, num_train=1, num_val=1, size=64)
    assert (tmp_path / "annotations/instances_train2017.json").read_text() == "{}"


@pytest.mark.parametrize("bad", [{"num_train": 0}, {"num_val": -1}, {"size": 8}, {"seed": -1}, {"size": 64.5}])
def test_parameters_out_of_range_are_refused(tmp_path, bad):
    ((name, value),) = bad.items()
    with pytest.raises(InputError, match=f"{name}={value}"):
        generate_shapes(tmp_path / "s", **{**dict(num_train=1, num_val=1, size=64), **bad})


@pytest.mark.parametrize("corner", [0, 1])
def test_uncompressed_rle_is_cocos(corner):
    mask = np.random.default_rng(0).random((7, 5)) < 0.5
    mask[0, 0] = corner
    rle = coco_mask.frPyObjects(uncompressed_rle(mask), 7, 5)
    np.testing.assert_array_equal(coco_mask.decode(rle), mask)


def test_segmentation_is_exact_for_any_mask():
    rng = np.random.default_rng(0)
    kinds = set()
    for density in (0.02, 0.1, 0.3, 0.6, 0.9):
        for _ in range(20):
            mask = rng.random((12, 17)) < density
            mask[5, 5:8] = True
            segmentation = segmentation_of(mask)
            kinds.add(type(segmentation))
            rles = coco_mask.frPyObjects(segmentation, 12, 17)
            rle = coco_mask.merge(rles) if isinstance(segmentation, list) else rles
            np.testing.assert_array_equal(coco_mask.decode(rle), mask)
    assert kinds == {list, dict}
