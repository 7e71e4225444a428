"""The generated data set: shapes by their formulas, in exact COCO layout, and the same bytes every time."""

import json

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from mrla_mm.datasets import generate_shapes
from mrla_mm.datasets.shapes import CLASSES, MIN_PIXELS, MIN_VISIBLE, draw_scene, shape_mask
from mrla_mm.errors import InputError

FEW = dict(num_train=3, num_val=1, size=64)


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "shapes"
    assert generate_shapes(root, num_train=26, num_val=6, size=128) is True
    return root


@pytest.fixture(scope="module", params=["train2017", "val2017"])
def coco(request, root):
    split = COCO(root / f"annotations/instances_{request.param}.json")
    split.folder = root / request.param
    return split


def test_images_are_as_listed_and_instances_share_no_pixel(coco):
    assert len(coco.dataset["images"]) == len(list(coco.folder.iterdir()))
    for image in coco.dataset["images"]:
        assert cv2.imread(str(coco.folder / image["file_name"])).shape == (
            image["height"],
            image["width"],
            3,
        )
        masks = [coco.annToMask(each) for each in coco.imgToAnns[image["id"]]]
        assert not masks or np.sum(masks, 0).max() == 1


def test_there_are_all_kinds_of_content_under_unique_ids(root):
    splits = [
        json.loads((root / f"annotations/instances_{s}.json").read_text())
        for s in ("train2017", "val2017")
    ]
    for kind in ("images", "annotations"):
        ids = [each["id"] for split in splits for each in split[kind]]
        assert len(set(ids)) == len(ids) and min(ids) > 0
    assert [[each["name"] for each in split["categories"]] for split in splits] == [
        list(CLASSES)
    ] * 2
    plain = [each for each in splits[0]["annotations"] if not each["iscrowd"]]
    assert {each["category_id"] for each in plain} == set(range(1, len(CLASSES) + 1))
    assert len(splits[0]["annotations"]) - len(plain) == 3, "crowds"
    assert {each["id"] for each in splits[0]["images"]} - {
        each["image_id"] for each in splits[0]["annotations"]
    }


def test_same_parameters_give_the_same_bytes_and_are_kept(tmp_path):
    for name in ("one", "two"):
        assert generate_shapes(tmp_path / name, **FEW) is True
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert generate_shapes(tmp_path / "one", **FEW) is False
    assert generate_shapes(tmp_path / "two", **FEW, seed=1) is True
    image = "train2017/000000000002.jpg"
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one[image] != two[image] and one.keys() == two.keys()
    generate_shapes(tmp_path / "one", **FEW | dict(num_train=4))
    assert contents(tmp_path / "one")[image] == one[image], (
        "a longer split begins with the same images"
    )
    assert len(contents(tmp_path / "one")) == len(one) + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_killed_run_leaves_nothing_that_counts(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(*args):
            raise KeyboardInterrupt

        patch.setattr(cv2, "imwrite", killed)
        generate_shapes(tmp_path / "shapes", **FEW)
    assert generate_shapes(tmp_path / "shapes", **FEW) is True
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not a generated data set"):
        generate_shapes(tmp_path, **FEW)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


AREAS = {  # of shapes of radius 1, by hand
    "circle": np.pi,
    "rectangle": 4 * 0.84 * 0.54,
    "triangle": 3 * 3**0.5 / 4,
    "star": 10 * 0.45 * np.sin(np.pi / 5) / 2,
    "ring": np.pi * (1 - 0.55**2),
    "cross": 4 * 0.28 * (2 * 0.95 - 0.28),
}


@pytest.mark.parametrize("name", CLASSES)
def test_shapes_have_the_area_of_their_formula_and_are_cut_off_at_the_border(name):
    whole = shape_mask(name, 200, 200, centre=(100, 100), radius=40, angle=0.7)
    assert whole.sum() == pytest.approx(AREAS[name] * 40**2, rel=0.01)
    cut = shape_mask(name, 100, 90, centre=(10, 95), radius=40, angle=0.7)
    np.testing.assert_array_equal(cut, whole[5:105, 90:180])


def test_visible_is_what_repainting_leaves_and_enough_to_recognise():
    hidden = 0
    for seed in range(20):
        _, instances = draw_scene(
            96, 128, rng=np.random.default_rng(seed), crowd=seed % 3 == 0, empty=False
        )
        owner = np.full((96, 128), -1)
        for index, instance in enumerate(instances):
            owner[instance.full] = index
        for index, instance in enumerate(instances):
            np.testing.assert_array_equal(instance.visible, owner == index)
            hidden += np.count_nonzero(instance.full & ~instance.visible)
            assert instance.visible.sum() >= max(MIN_PIXELS, MIN_VISIBLE * instance.full.sum())
    assert hidden > 1000, "the scenes do not overlap, so this test shows nothing"
