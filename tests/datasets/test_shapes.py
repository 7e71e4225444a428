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
    generate_shapes(tmp_path / "data", num_train=26, num_val=6, size=128)
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
    written = []
    for number, more in enumerate(({}, {}, dict(seed=1), dict(num_train=4))):
        generate_shapes(tmp_path / str(number), **FEW | more)
        written.append(contents(tmp_path / str(number)))
    one, two, other, longer = written
    assert one == two
    image = "train2017/000000000002.jpg"
    assert one[image] != other[image] and one.keys() == other.keys()
    assert longer[image] == one[image] and len(longer) == len(one) + 1
    (tmp_path / "0" / image).unlink()
    generate_shapes(tmp_path / "0", **FEW)
    assert image not in contents(tmp_path / "0"), "they are not written again"


def test_an_interrupted_run_leaves_nothing_and_another_folder_is_left_alone(tmp_path):
    with pytest.raises(TypeError):
        generate_shapes(tmp_path / "shapes", num_train=1, num_val=None)  # fails in its second split
    generate_shapes(tmp_path / "shapes", **FEW)
    before = sorted(tmp_path.rglob("*"))
    assert before[0] == tmp_path / "shapes"
    for folder, more in (("", {}), ("shapes", dict(seed=1))):
        with pytest.raises(InputError, match="delete it or give another"):
            generate_shapes(tmp_path / folder, **FEW, **more)
    assert sorted(tmp_path.rglob("*")) == before
