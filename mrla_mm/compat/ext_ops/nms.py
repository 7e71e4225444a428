"""Non-maximum suppression: greedy and soft."""

import numpy as np
import torch
import torchvision.ops
from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype

NAIVE, LINEAR, GAUSSIAN = range(3)  # mmcv's numbering


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the boxes (N, 4) that greedy suppression keeps, by descending score.

    With offset 1 a box is ``x2 - x1 + 1`` wide, so it overlaps others as a box with x2 and y2 one
    larger does.
    """
    boxes = boxes.to(compute_dtype(boxes))
    boxes = boxes + boxes.new_tensor([0, 0, offset, offset])
    return torchvision.ops.nms(boxes, scores.to(boxes.dtype), iou_threshold)


def softnms(boxes, scores, dets, iou_threshold, sigma, min_score, method, offset) -> Tensor:
    """Soft-NMS (Bodla et al., ICCV 2017): the best box lowers the scores of those it overlaps.

    Writes the kept boxes and their new scores into the first rows of ``dets`` (N, 5) and returns
    their indices. As in mmcv, the best box stays whatever its score.
    """
    corners = boxes.detach().to(compute_dtype(boxes)).numpy()
    score = scores.detach().to(compute_dtype(boxes)).numpy().copy()
    rest = np.arange(len(score))
    kept = []
    while rest.size:
        place = score[rest].argmax()
        best = rest[place]
        rest = np.delete(rest, place)
        kept.append(best)
        overlap = _overlaps(corners, best, rest, offset)
        if method == GAUSSIAN:
            score[rest] *= np.exp(-(overlap**2) / sigma)
        else:
            lowered = 1 - overlap if method == LINEAR else 0
            score[rest] *= np.where(overlap >= iou_threshold, lowered, 1)
        rest = rest[score[rest] >= min_score]
    kept = torch.tensor(kept, dtype=torch.long)
    dets[: len(kept), :4] = boxes[kept].to(dets.dtype)
    dets[: len(kept), 4] = torch.from_numpy(score)[kept].to(dets.dtype)
    return kept


def _overlaps(corners: np.ndarray, one: int, others: np.ndarray, offset: int) -> np.ndarray:
    """Return the IoU of box ``one`` with each of ``others``; 0 where neither has an area."""
    sizes = (corners[:, 2:] - corners[:, :2] + offset).astype(corners.dtype)  # (N, 2)
    low = np.maximum(corners[one, :2], corners[others, :2])
    high = np.minimum(corners[one, 2:], corners[others, 2:])
    intersection = np.maximum(high - low + offset, 0).prod(1)
    union = sizes[one].prod() + sizes[others].prod(1) - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)
