"""What the ops must compute, in plain Python and differentiable float64 scalars."""

import math

import torch


def overlap(a, b, offset=0):
    """IoU of two boxes."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def greedy_nms(boxes, scores, threshold, offset=0):
    """Indices kept, best first."""
    kept = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if all(overlap(boxes[i], boxes[j], offset) <= threshold for j in kept):
            kept.append(i)
    return kept


def soft_nms(boxes, scores, *, threshold, sigma, min_score, method, offset=0):
    """Kept (index, score) pairs, best first."""
    scores, rest, kept = list(scores), list(range(len(scores))), []
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


def interpolate(plane, y, x):
    """The maps ``plane`` (C, H, W) at a point: border values reach one cell outwards, then zero."""
    height, width = plane.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return plane[:, 0, 0] * 0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = math.floor(y), math.floor(x)
    value = plane[:, 0, 0] * 0
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < height and 0 <= column < width:
                value = value + plane[:, row, column] * (1 - abs(y - row)) * (1 - abs(x - column))
    return value


def roi_align(maps, rois, shape, scale, ratio, mode, aligned):
    """(K, C, *shape) of ``maps`` (B, C, H, W), one sample at a time."""
    pooled = []
    for image, *corners in rois.tolist():
        left, top, right, bottom = (corner * scale - (0.5 if aligned else 0) for corner in corners)
        height, width = bottom - top, right - left
        if not aligned:
            height, width = max(height, 1.0), max(width, 1.0)
        bin_h, bin_w = height / shape[0], width / shape[1]
        rows, columns = (ratio, ratio) if ratio else (math.ceil(bin_h), math.ceil(bin_w))
        for i in range(shape[0]):
            for j in range(shape[1]):
                down = [top + (i + (r + 0.5) / rows) * bin_h for r in range(rows)]
                across = [left + (j + (c + 0.5) / columns) * bin_w for c in range(columns)]
                plane = maps[int(image)]
                samples = [interpolate(plane, y, x) for y in down for x in across]
                samples = samples or [plane[:, 0, 0] * 0]
                samples = torch.stack(samples)
                pooled.append(samples.max(0).values if mode == "max" else samples.mean(0))
    return torch.stack(pooled).view(len(rois), *shape, maps.shape[1]).permute(0, 3, 1, 2)
