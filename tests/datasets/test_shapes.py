"""The generated data: shapes by their formulas, exact COCO layout, the same bytes every time."""

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from mrla_mm.datasets import generate_shapes
from mrla_mm.datasets.shapes import CLASSES, MIN_PIXELS
from mrla_mm.errors import InputError

FEW = dict(num_train=3, num_val=1, size=64)


def contents(root):
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_images_masks_and_annotations_agree(tmp_path):
    assert generate_shapes(tmp_path / "data", num_train=26, num_val=6, size=128) is True
    ids, labels = [], set()
    for split, count in (("train2017", 26), ("val2017", 6)):
        coco = COCO(tmp_path / f"data/annotations/instances_{split}.json")
        assert [each["name"] for each in coco.dataset["categories"]] == list(CLASSES)
        assert len(coco.imgs) == len(list((tmp_path / "data" / split).iterdir())) == count
        for image in coco.imgs.values():
            picture = cv2.imread(str(tmp_path / "data" / split / image["file_name"]))
            assert picture.shape == (image["height"], image["width"], 3)
            assert max(picture.shape) == 128
            union = np.zeros(picture.shape[:2], int)
            for each in coco.imgToAnns[image["id"]]:
                mask = coco.annToMask(each)
                x, y, width, height = map(int, each["bbox"])
                assert mask[y : y + height, x : x + width].sum() == mask.sum() == each["area"]
                assert each["area"] >= 0.6 * MIN_PIXELS
                union += mask
                labels.add(each["category_id"])
            assert union.max() == 1 and picture[union == 1].mean() > picture[union == 0].mean()
        ids += [*coco.imgs, *coco.anns]
    assert labels == set(range(1, len(CLASSES) + 1))
    assert len(set(ids)) == len(ids)


def test_same_parameters_give_the_same_bytes_and_are_kept(tmp_path):
    for name in ("one", "two"):
        assert generate_shapes(tmp_path / name, **FEW) is True
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    assert generate_shapes(tmp_path / "one", **FEW) is False
    assert generate_shapes(tmp_path / "two", **FEW, seed=1) is True
    image = "train2017/000000000002.jpg"
    two = contents(tmp_path / "two")
    assert one[image] != two[image] and one.keys() == two.keys()
    generate_shapes(tmp_path / "one", **FEW | dict(num_train=4))
    longer = contents(tmp_path / "one")
    assert longer[image] == one[image] and len(longer) == len(one) + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_killed_run_leaves_nothing_and_another_folder_is_left_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.delattr(cv2, "imwrite")
        generate_shapes(tmp_path / "shapes", **FEW)
    assert generate_shapes(tmp_path / "shapes", **FEW) is True
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]
    with pytest.raises(InputError, match="choose another folder"):
        generate_shapes(tmp_path, **FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_files_of_somebody_else_are_left_alone(tmp_path):
    """As the manifest of a folder, or inside a data set."""
    for manifest in ('{"circles": 3}', "[]", "not JSON", '{"num_train": 3}'):
        (tmp_path / "shapes.json").write_text(manifest)
        with pytest.raises(InputError, match="shapes.json"):
            generate_shapes(tmp_path, **FEW)
        assert contents(tmp_path) == {"shapes.json": manifest.encode()}
    root = tmp_path / "shapes"
    generate_shapes(root, **FEW)
    (root / "train2017/mine.txt").touch()
    before = contents(root)
    assert generate_shapes(root, **FEW) is False, "it is there"
    with pytest.raises(InputError, match="train2017/mine.txt"):
        generate_shapes(root, **FEW, seed=1)
    assert contents(root) == before
