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


def interpolate(plane, y, x, *, beyond):
    """The maps ``plane`` (C, H, W) at one point, differentiable by the maps and by y and x.

    ``beyond='edge'`` extends the border values one cell outwards (RoIAlign), ``'zero'`` fades to
    zero (deformable convolution); both are zero farther out.
    """
    height, width = plane.shape[1:]
    y, x = (torch.as_tensor(v, dtype=plane.dtype) for v in (y, x))
    if not (-1 <= y.item() <= height and -1 <= x.item() <= width):
        return plane[:, 0, 0] * 0
    if beyond == "edge":
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    top, left = math.floor(y.item()), math.floor(x.item())
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
                samples = [interpolate(plane, y, x, beyond="edge") for y in down for x in across]
                samples = samples or [plane[:, 0, 0] * 0]
                samples = torch.stack(samples)
                pooled.append(samples.max(0).values if mode == "max" else samples.mean(0))
    return torch.stack(pooled).view(len(rois), *shape, maps.shape[1]).permute(0, 3, 1, 2)


def deform_conv(
    maps, offset, weight, *, stride, padding, dilation, groups, deform_groups, mask=None, bias=None
):
    """Deformable convolution, one output cell and kernel tap at a time."""
    batch, channels = maps.shape[:2]
    taps = [(a, b) for a in range(weight.shape[2]) for b in range(weight.shape[3])]
    per_offset, per_group = channels // deform_groups, channels // groups
    rows = []
    for n in range(batch):
        for i in range(offset.shape[2]):
            for j in range(offset.shape[3]):
                sampled = []  # one (C,) per tap
                for t, (a, b) in enumerate(taps):
                    parts = []
                    for g in range(deform_groups):
                        k = g * len(taps) + t
                        y = i * stride[0] - padding[0] + a * dilation[0] + offset[n, 2 * k, i, j]
                        x = (
                            j * stride[1]
                            - padding[1]
                            + b * dilation[1]
                            + offset[n, 2 * k + 1, i, j]
                        )
                        plane = maps[n, g * per_offset : (g + 1) * per_offset]
                        value = interpolate(plane, y, x, beyond="zero")
                        parts.append(value if mask is None else value * mask[n, k, i, j])
                    sampled.append(torch.cat(parts))
                column = torch.stack(sampled, 1).view(
                    groups, per_group, -1
                )  # (groups, C/groups, taps)
                kernels = weight.flatten(2).unflatten(
                    0, (groups, -1)
                )  # (groups, O/groups, C/groups, taps)
                rows.append(torch.einsum("gct,goct->go", column, kernels).flatten())
    out = torch.stack(rows).view(batch, *offset.shape[2:], -1).permute(0, 3, 1, 2)
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def ms_deform_attn(value, shapes, locations, weights):
    """Multi-scale deformable attention, one point at a time: (B, queries, heads * channels)."""
    batch, _, heads, _ = value.shape
    out = []
    for n in range(batch):
        for q in range(locations.shape[1]):
            for h in range(heads):
                total, start = 0, 0
                for level, (height, width) in enumerate(shapes.tolist()):
                    plane = value[n, start : start + height * width, h].T.reshape(-1, height, width)
                    start += height * width
                    for p in range(locations.shape[4]):
                        x, y = locations[n, q, h, level, p]
                        sample = interpolate(
                            plane, y * height - 0.5, x * width - 0.5, beyond="zero"
                        )
                        total = total + weights[n, q, h, level, p] * sample
                out.append(total)
    return torch.stack(out).view(batch, locations.shape[1], -1)


def carafe(maps, masks, size, groups, scale):
    """CARAFE, one output cell and kernel tap at a time."""
    height, width = maps.shape[2:]
    channels = maps.shape[1] // groups
    rows = []
    for y in range(height * scale):
        for x in range(width * scale):
            total = torch.zeros_like(maps[:, :, 0, 0])
            for tap in range(size * size):
                row, column = (
                    y // scale + tap // size - size // 2,
                    x // scale + tap % size - size // 2,
                )
                if 0 <= row < height and 0 <= column < width:
                    kernel = masks[:, tap :: size * size, y, x]  # (B, groups)
                    total = total + kernel.repeat_interleave(channels, 1) * maps[:, :, row, column]
            rows.append(total)
    return torch.stack(rows, 2).unflatten(2, (height * scale, width * scale))
