"""Pictures of detections: colours, sides, and weak detections left out."""

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData

from mrla_mm.analysis.gallery import compare, contact_sheet

META = {"classes": ("red", "blue"), "palette": [(255, 0, 0), (0, 0, 255)]}
GREY = np.full((60, 80, 3), 128, np.uint8)
FACTOR = 7  # 80 pixels are enlarged to at least 512


def detections(scores):
    masks = torch.zeros(2, 60, 80, dtype=torch.bool)
    masks[0, 25:50, 5:30] = True
    masks[1, 25:50, 45:70] = True
    boxes = torch.tensor([[5.0, 25, 30, 50], [45, 25, 70, 50]])
    found = dict(bboxes=boxes, labels=torch.tensor([0, 1]), scores=torch.tensor(scores))
    return InstanceData(masks=masks, **found)


def inner(picture, x1, x2):
    """Mean colour of the lower part of a box, below its name."""
    part = picture[42 * FACTOR : 48 * FACTOR, x1 * FACTOR : x2 * FACTOR]
    return part.reshape(-1, 3).mean(0)


def test_truth_is_left_and_prediction_right():
    predicted = detections((0.2, 0.9))
    truth = InstanceData(bboxes=predicted.bboxes[:1], labels=torch.tensor([0]))
    truth.masks = BitmapMasks(predicted.masks[:1].numpy().astype(np.uint8), 60, 80)
    sample = DetDataSample(gt_instances=truth, pred_instances=predicted)
    picture = compare(GREY, sample, META, score_thr=0.5)
    assert picture.shape == (60 * FACTOR, 160 * FACTOR, 3)
    left, right = np.split(picture, 2, axis=1)
    assert inner(left, 10, 26)[0] > inner(left, 10, 26)[2] + 30
    np.testing.assert_allclose(inner(left, 50, 66), 128, atol=2)
    np.testing.assert_allclose(inner(right, 10, 26), 128, atol=2)
    assert inner(right, 50, 66)[2] > inner(right, 50, 66)[0] + 30
    sample.pred_instances = predicted[:0]
    nothing = compare(GREY, sample, META)
    np.testing.assert_allclose(np.split(nothing, 2, axis=1)[1], 128)


def test_contact_sheet_holds_every_picture():
    sizes = enumerate((40, 60, 80), 1)
    pictures = [np.full((height, 100, 3), 50 * number, np.uint8) for number, height in sizes]
    sheet = contact_sheet(pictures, columns=2, width=50)
    areas = [np.count_nonzero((sheet == value).all(-1)) for value in (50, 100, 150)]
    assert areas == [50 * 20, 50 * 30, 50 * 40]
