import math

import pytest
import torch
from mmcv.ops import nms, roi_align, sigmoid_focal_loss, soft_nms
from torch.nn.functional import avg_pool2d, grid_sample
from torch.testing import assert_close

from mrla_mm.errors import InputError

from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in


def overlap(a, b, offset=0):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def reference(boxes, scores, *, threshold, min_score=0.01, method="naive", sigma=1, offset=0):
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
    scores = (torch.randperm(count) + 1) / (count + 1)
    return torch.cat([corner, corner + size], 1).to(device), scores.to(device)


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
    boxes = torch.cat([(boxes[:, :2] / 8).floor(), (boxes[:, 2:] / 8).ceil()], 1)  # many IoUs 0.5
    boxes[0] += 40  # overlaps none, so that its score stays at the minimum
    options = dict(sigma=0.4, min_score=scores[0].item(), method=method, offset=offset)
    dets, kept = soft_nms(boxes, scores, iou_threshold=0.5, **options)
    expected = reference(boxes, scores, threshold=0.5, **options)
    assert kept.tolist() == [index for index, _ in expected]
    assert len(kept) < 60, "nothing fell below min_score: the case tests nothing"
    assert_close(dets[:, :4], boxes[kept])
    assert_close(dets[:, 4].cpu(), torch.tensor([score for _, score in expected]))


@pytest.mark.parametrize("op", [nms, soft_nms])
def test_no_boxes(device, op):
    dets, kept = op(torch.zeros(0, 4, device=device), torch.zeros(0, device=device), 0.5)
    assert dets.shape == (0, 5) and kept.shape == (0,) and kept.dtype == torch.long


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_focal_loss(device, gamma, weighted, dtype):
    logits = torch.randn(7, 4, dtype=torch.float64) * 3
    target = torch.arange(7, device=device) % 5  # the last is background
    weight = torch.rand(4).to(device, dtype) + 0.5 if weighted else None

    def formula(x):
        p = x.sigmoid()
        hot = torch.nn.functional.one_hot(target, 5)[:, :-1].bool()
        hit, miss = -0.3 * (1 - p) ** gamma * p.log(), -0.7 * p**gamma * (1 - p).log()
        loss = torch.where(hot, hit, miss)
        if weighted:
            loss = loss * torch.cat([weight, weight.new_ones(1)])[target, None].double()
        return loss

    check_op(
        lambda x: sigmoid_focal_loss(x, target, gamma, 0.3, weight, "none"),
        formula,
        [logits.to(device, dtype).requires_grad_()],
        atol=1e-6,
    )


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_is_stable_far_out(device, gamma):
    options = dict(device=device, dtype=torch.bfloat16)
    logits = torch.tensor([[-200.0, 200.0], [200.0, -200.0]], **options, requires_grad=True)
    target = torch.tensor([0, 0], device=device)
    loss = sigmoid_focal_loss(logits, target, gamma, 0.25, None, "none")
    assert_close(loss, torch.tensor([[50.0, 150.0], [0.0, 0.0]], **options))
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    assert_close(grad, torch.tensor([[-0.25, 0.75], [0.0, 0.0]], **options))


ROIS = [
    [0, 3.1, 2.3, 17.9, 22.2],
    [1, 0.0, 0.0, 26.0, 18.0],  # the whole map
    [1, -9.0, -7.0, 8.0, 9.0],  # across the border
    [0, 20.0, 10.0, 44.0, 33.0],
    [0, 70.0, 70.0, 90.0, 90.0],  # outside
    [1, 5.3, 4.2, 5.4, 4.4],  # smaller than a pixel
    [0, 4.0, 4.0, 4.0, 4.0],  # without area
    [1, 9.0, 8.0, 6.0, 5.0],  # corners exchanged
]


def align_by_hand(maps, rois, shape, scale, ratio, mode, aligned):
    height, width = maps.shape[2:]
    pooled = []
    for image, *corners in rois.tolist():
        left, top, right, bottom = (corner * scale - aligned / 2 for corner in corners)
        places, grid = [], []
        for start, end, bins in ((top, bottom, shape[0]), (left, right, shape[1])):
            size = (end - start if aligned else max(end - start, 1)) / bins
            grid.append(ratio or max(math.ceil(size), 0))
            steps = torch.arange(bins * grid[-1], device=maps.device).to(maps) + 0.5
            places.append(start + steps * size / max(grid[-1], 1))
        if 0 in grid:
            pooled.append(maps.new_zeros(maps.shape[1], *shape))
            continue
        y, x = torch.meshgrid(*places, indexing="ij")
        points = torch.stack([x / (width - 1), y / (height - 1)], -1)[None] * 2 - 1
        options = dict(padding_mode="border", align_corners=True)
        samples = grid_sample(maps[int(image)][None], points, **options)[0]
        inside = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
        pooled.append(avg_pool2d(samples * inside, grid))
    return torch.stack(pooled)


@pytest.mark.parametrize(("repeats", "channels"), [(1, 3), (5, 1152)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(device, repeats, channels, dtype, aligned, ratio):
    """On a CPU, large inputs are pooled by a sparse product."""
    rois = torch.tensor(ROIS, device=device).to(dtype).repeat(repeats, 1)
    arguments = ((3, 2), 0.5, ratio, "avg", aligned)
    x = torch.randn(2, channels, 9, 13, device=device).to(dtype).requires_grad_()
    check_op(
        lambda x: roi_align(x, rois, *arguments),
        lambda x: align_by_hand(x, rois.double(), *arguments),
        [x],
        atol=1e-3,
    )


def test_no_rois(device):
    x = torch.randn(2, 3, 9, 13, device=device, requires_grad=True)
    out = roi_align(x, x.new_zeros(0, 5), (3, 2), 0.5, 0, "avg", True)
    assert out.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() == 0


def test_the_maximum_is_left_to_compiled_mmcv():
    x = torch.randn(1, 2, 9, 13)
    with pytest.raises(NotImplementedError, match="compiled mmcv"):
        roi_align(x, x.new_zeros(1, 5), (3, 2), 0.5, 0, "max", True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_boxes_that_are_not_finite_are_refused(value):
    x = torch.randn(1, 2, 9, 13)
    rois = torch.tensor([[0.0, 1, 1, 5, 5], [0.0, 1, 1, value, 5]])
    with pytest.raises(InputError, match=str(value)):
        roi_align(x, rois, (3, 2), 0.5, 2, "avg", True)
