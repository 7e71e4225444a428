"""Pictures of detections: colours, sides, and weak detections left out."""

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData

from mrla_mm.analysis.gallery import compare, contact_sheet, draw_detections

META = {"classes": ("red", "blue"), "palette": [(255, 0, 0), (0, 0, 255)]}
GREY = np.full((60, 80, 3), 128, np.uint8)


def detections(scores=(0.9, 0.2)):
    masks = torch.zeros(2, 60, 80, dtype=torch.bool)
    masks[0, 25:50, 5:30] = True
    masks[1, 25:50, 45:70] = True
    boxes = torch.tensor([[5.0, 25, 30, 50], [45, 25, 70, 50]])
    return InstanceData(
        bboxes=boxes, labels=torch.tensor([0, 1]), scores=torch.tensor(scores), masks=masks
    )


def inner(picture, x1, x2, *, factor=1):
    """Mean colour of the lower part of a box, below its name."""
    return picture[42 * factor : 48 * factor, x1 * factor : x2 * factor].reshape(-1, 3).mean(0)


def test_masks_take_their_class_colour_and_weak_ones_are_left_out():
    picture = draw_detections(GREY, detections(), meta=META, score_thr=0.5, min_side=320)
    assert picture.shape == (240, 320, 3)
    red, unpainted = inner(picture, 10, 26, factor=4), inner(picture, 50, 66, factor=4)
    assert red[0] > max(red[1:]) + 30
    np.testing.assert_allclose(unpainted, 128, atol=2)


def test_truth_is_left_and_prediction_right():
    predicted = detections((0.9, 0.9))
    truth = InstanceData(bboxes=predicted.bboxes[:1], labels=torch.tensor([0]))
    truth.masks = BitmapMasks(predicted.masks[:1].numpy().astype(np.uint8), 60, 80)
    sample = DetDataSample(gt_instances=truth, pred_instances=predicted[1:])
    picture = compare(GREY, sample, meta=META, score_thr=0.5, min_side=1)
    left, right = picture[-60:, :80], picture[-60:, -80:]
    assert inner(left, 10, 26)[0] > inner(left, 10, 26)[2] + 30
    np.testing.assert_allclose(inner(left, 50, 66), 128, atol=2)
    np.testing.assert_allclose(inner(right, 10, 26), 128, atol=2)
    assert inner(right, 50, 66)[2] > inner(right, 50, 66)[0] + 30


def test_contact_sheet_holds_every_picture():
    pictures = [
        np.full((40 + 20 * number, 100, 3), 50 * number + 50, np.uint8) for number in range(3)
    ]
    sheet = contact_sheet(pictures, columns=2, width=50)
    areas = [np.count_nonzero((sheet == value).all(-1)) for value in (50, 100, 150)]
    assert areas == [50 * 20, 50 * 30, 50 * 40]
