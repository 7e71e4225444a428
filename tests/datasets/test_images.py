"""Image files and objects of built data sets: what is missing, and which file cannot be read."""

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

from mrla_mm.datasets import images
from mrla_mm.errors import InputError

from .conftest import built, edit


def test_missing_images_are_counted(make_coco, make_config):
    """The first missing files are named, and how many there are."""
    root = make_coco(images=6)
    for index in (1, 4, 5):
        (root / f"train2017/{index:06}.jpg").unlink()
    with pytest.raises(InputError, match=r"3 of 6 images .* first .*000001\.jpg, .*000004\.jpg, .*000005\.jpg"):
        images.check_images_exist(built(make_config(root)), "train")


@pytest.mark.parametrize("wrap", [list, lambda dataset: ConcatDataset([dataset, dataset])])
def test_data_sets_of_no_annotation_file_are_left_alone(wrap):
    """Any data set of torch may be trained on; only mmengine's say which files they read."""
    dataset = wrap([torch.zeros(3)])
    images.check_images_exist(dataset, "train")
    images.check_objects(dataset, "train")
    images.name_image_errors(dataset)


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
    whole = path.read_bytes()
    for appended in (100, images.TAIL + 1):
        path.write_bytes(whole + b"\0" * appended)
        assert images.fault_of(str(path)) is None


def test_a_thumbnail_does_not_pass_for_the_whole_image(make_coco):
    """Half a JPEG is half a JPEG, even if the thumbnail in its head has an end marker."""
    path = make_coco(images=1) / "train2017/000000.jpg"
    whole = path.read_bytes()
    thumbnail = b"\xff\xe1" + (2 + len(whole)).to_bytes(2, "big") + whole
    path.write_bytes(whole[:2] + thumbnail + whole[2:] + b"\0" * images.TAIL)
    assert images.fault_of(str(path)) is None
    path.write_bytes(whole[:2] + thumbnail + whole[2 : len(whole) // 2] + b"\0" * images.TAIL)
    assert images.fault_of(str(path)) == "the file is cut off"
