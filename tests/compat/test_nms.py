import math

import pytest
import torch
from mmcv.ops import nms, nms_match, soft_nms
from torch.testing import assert_close

from .conftest import needs_stand_in

pytestmark = needs_stand_in


def overlap(a, b, offset=0):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def reference(boxes, scores, *, threshold, min_score=0.01, method="naive", sigma=1, offset=0):
    """Kept (index, score) pairs of Soft-NMS, best first; naive, those of greedy suppression."""
    boxes, scores = boxes.tolist(), scores.tolist()
    rest, kept = list(range(len(scores))), []
    while rest:
        best = max(rest, key=lambda i: scores[i])
        rest.remove(best)
        kept.append((best, scores[best]))
        for i in rest:
            iou = overlap(boxes[best], boxes[i], offset)
            if method == "gaussian":
                scores[i] *= math.exp(-(iou**2) / sigma)
            elif iou >= threshold:
                scores[i] *= 1 - iou if method == "linear" else 0
        rest = [i for i in rest if scores[i] >= min_score]
    return kept


def crowd(count, device="cpu"):
    corner, size = torch.rand(count, 2) * 40, torch.rand(count, 2) * 30 + 1
    boxes = torch.cat([corner, corner + size], 1)
    scores = (torch.randperm(count) + 1) / (count + 1)
    return boxes.to(device), scores.to(device)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_nms_keeps_what_the_greedy_loop_keeps(device, offset, threshold):
    boxes, scores = crowd(80, device)
    dets, kept = nms(boxes, scores, threshold, offset=offset)
    expected = reference(boxes, scores, threshold=threshold, offset=offset)
    assert kept.tolist() == [index for index, _ in expected]
    assert kept.dtype == torch.long and kept.device.type == device.type
    assert_close(dets, torch.cat([boxes[kept], scores[kept, None]], 1))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms(device, method, offset):
    boxes, scores = crowd(60, device)
    options = dict(sigma=0.4, min_score=0.05, method=method, offset=offset)
    dets, kept = soft_nms(boxes, scores, iou_threshold=0.3, **options)
    expected = reference(boxes, scores, threshold=0.3, **options)
    assert kept.tolist() == [index for index, _ in expected]
    assert len(kept) < 60, "nothing fell below min_score: the case tests nothing"
    assert_close(dets[:, :4], boxes[kept])
    assert_close(dets[:, 4].cpu(), torch.tensor([score for _, score in expected]))
    assert dets.device.type == device.type


def test_nms_match_groups():
    boxes, scores = crowd(40)
    order, groups, corners = scores.argsort(descending=True).tolist(), [], boxes.tolist()
    while order:
        best = corners[order[0]]
        groups.append([i for i in order if overlap(best, corners[i]) >= 0.4])
        order = [i for i in order if i not in groups[-1]]
    matched = nms_match(torch.cat([boxes, scores[:, None]], 1), 0.4)
    assert [m.tolist() for m in matched] == groups
    assert max(len(group) for group in groups) > 1


@pytest.mark.parametrize("op", [nms, soft_nms])
def test_no_boxes(device, op):
    dets, kept = op(torch.zeros(0, 4, device=device), torch.zeros(0, device=device), 0.5)
    assert dets.shape == (0, 5) and kept.shape == (0,) and kept.dtype == torch.long
