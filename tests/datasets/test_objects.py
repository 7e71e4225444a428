"""Objects of annotation files: which masks are refused, and what is declared lost with a count."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mrla_mm.datasets import checks, masks

from .conftest import VAL, edit, message


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_run_lengths_are_unpacked_as_pycocotools_packs_them(density):
    """Against pycocotools: the lengths add up to the image, and every second one to the mask's area."""
    drawn = np.asfortranarray(np.random.default_rng(0).random((37, 211)) < density, dtype=np.uint8)
    packed = coco_mask.encode(drawn)
    lengths = masks.unpack(packed["counts"].decode())
    assert sum(lengths) == drawn.size and sum(lengths[1::2]) == coco_mask.area(packed)
    whole = dict(size=[37, 211], counts=packed["counts"].decode())
    assert masks.fault_of(whole, 37, 211, True) is None
    assert masks.fault_of(whole | dict(counts=whole["counts"][:-1] + "~"), 37, 211, True)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], "neither a list of polygons"),
        ([["1"] * 6], "something other than numbers"),
        ([[float("nan")] * 6], "something other than numbers"),
        ([[1e9, 0, 0, 0, 0, 9]], "leaves the image of 96 x 64 pixels by far"),
        (dict(size=[96, 64], counts=[0, 6144]), r"need size=\[64, 96\]"),
        (dict(size=[64, 96], counts=[-5, 6149]), "no whole numbers that add up to 64 x 96"),
        (dict(size=[64, 96], counts="\t"), "no whole numbers"),
        (dict(size=[64, 96]), "no whole numbers"),
    ],
)
def test_masks_that_pycocotools_ends_on_are_named(mask, expected, make_coco, make_config):
    root = make_coco(images=2)
    edit(root, lambda content: content["annotations"][2].update(segmentation=mask))
    with pytest.raises(ValueError, match=rf"annotations\[2\] has segmentation=.*{expected}"):
        checks.check_datasets(make_config(root), ("train",))


def test_lost_objects_are_counted(make_coco, make_config):
    """Each reason for which mmdet leaves out an object is stated, with how many and which is the first."""
    root = make_coco(images=5)

    def spoil(content):
        entries = content["annotations"]
        entries[0].update(image_id=99)
        entries[1].update(bbox=[5, 5, 0, 9])
        entries[2].update(bbox=[500, 5, 9, 9])
        entries[3].update(ignore=1)
        entries[4].update(category_id=999)
        entries[5].update(segmentation=[[1, 2, 3, 4]])
        content["images"][3].update(height=20)

    edit(root, spoil)
    with pytest.warns(UserWarning, match="8 of 10 annotations will not be trained on") as caught:
        checks.check_datasets(make_config(root), ("train",))
    said = str(caught[0].message)
    for part in ("1 on images that the file does not list (the first has id 1)", "2 with a box or area of nothing"):
        assert part in said
    for part in ('1 marked "ignore"', "1 of categories that the file", "2 on images with a side", "1 with no polygon"):
        assert part in said


def test_ids_that_pycocotools_miscounts(make_coco, make_config):
    """By the id 0 pycocotools means no match; text is no id to it."""
    root = make_coco(images=2)
    edit(root, lambda content: content["annotations"][0].update(id=0), VAL)
    with pytest.warns(UserWarning, match="has the id 0, by which pycocotools means no match"):
        checks.check_datasets(make_config(root), ("val",))
    edit(root, lambda content: [a.update(id=str(a["id"])) for a in content["annotations"]], VAL)
    assert "id='0', but pycocotools needs numbers" in message(make_config(root), ("val",))


@pytest.mark.parametrize(
    ("key", "change", "expected"),
    [
        ("annotations", dict(iscrowd="0"), "iscrowd='0'; it must be 0 or 1"),
        ("annotations", dict(ignore=float("inf")), "ignore=inf"),
        ("annotations", dict(id=True), "id=True, which is no id"),
        ("images", dict(id="x"), "some ids of its images are numbers and some are text"),
        ("categories", dict(name=[]), "name=[], which is no string"),
        ("categories", dict(name="person"), "two of its categories have the name 'person'"),
    ],
)
def test_values_that_would_lose_objects_are_named(key, change, expected, make_coco, make_config):
    root = make_coco(images=2)
    edit(root, lambda content: content[key][1].update(change))
    assert expected in message(make_config(root))


def test_byte_order_mark(make_coco, make_config):
    root = make_coco(images=1)
    path = root / VAL
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert f"{path} begins with a byte order mark" in message(make_config(root), ("val",))
