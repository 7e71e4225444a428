"""Class activation maps: what in an image supports a prediction (the paper's App. B.5).

For a layer's map A (K, h, w) and a score s(image), both are relu(sum_k w_k A_k), scaled to 0..1,
with

    Grad-CAM   w_k = mean over the grid of ds / dA_k
    ScoreCAM   w_k = softmax_k(s(image * A'_k)),  A'_k = A_k scaled to 0..1 and to the image's size

A classifier's score is the logit of a class. A detector's is the log-odds of its best detection of
the class whose box overlaps a given one with an IoU of at least 0.5, p = 0.001 if there is none:
among probabilities, ScoreCAM's softmax would weigh all maps alike.

The grad-cam package draws the same maps, but installs opencv-python-headless over the opencv-python
that mmcv requires.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.structures.bbox import bbox_overlaps
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mrla_mm.errors import InputError

MIN_IOU = 0.5


class Target(NamedTuple):
    """What is explained: a class, and for detectors a box (4,) in pixels of the model's input."""

    label: int
    box: Tensor | None = None


class WithoutDetach(TorchFunctionMode):
    """Makes `detach` do nothing: mmdet's dense heads detach scores before they choose boxes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.detach:
            return args[0]
        return function(*args, **(kwargs or {}))


def detect(model: nn.Module, images: Tensor, sample) -> list:
    """Return the detections in each of a batch of images (B, 3, H, W), in their pixels."""
    samples = [copy.deepcopy(sample) for _ in images]
    return [result.pred_instances for result in model.predict(images, samples, rescale=False)]


@torch.no_grad()
def choose_target(model: nn.Module, images: Tensor, sample=None, label=None) -> Target | None:
    """Return a detector's best detection, of class `label` if given, or a classifier's best class.

    It is None if a detector finds nothing; `sample` is the detector's data sample.
    """
    if not hasattr(model, "with_bbox"):
        logits = model(images, mode="tensor")
        return Target(int(logits.argmax()) if label is None else label)
    (instances,) = detect(model, images, sample)
    if label is not None:
        instances = instances[instances.labels == label]
    if len(instances) == 0:
        return None
    best = int(instances.scores.argmax())
    return Target(int(instances.labels[best]), instances.bboxes[best])


def score(model: nn.Module, images: Tensor, target: Target, sample=None) -> Tensor:
    """Score each image by what the target says: (B, 3, H, W) -> (B,)."""
    if target.box is None:
        return model(images, mode="tensor")[:, target.label]
    best = []
    for instances in detect(model, images, sample):
        boxes = instances.bboxes.detach()
        overlaps = bbox_overlaps(boxes, target.box[None].to(boxes))[:, 0]
        scores = instances.scores[(instances.labels == target.label) & (overlaps >= MIN_IOU)]
        best.append(scores.max() if len(scores) else images.new_tensor(0.0))
    return torch.logit(torch.stack(best).clamp(1e-3, 1 - 1e-6))


def run_with_map(layer: nn.Module, function: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Call a function that runs a layer; return its result and the layer's map (1, K, h, w)."""
    outputs = []
    with layer.register_forward_hook(lambda module, args, output: outputs.append(output)):
        result = function()
    if not outputs or not isinstance(outputs[0], Tensor) or outputs[0].dim() != 4:
        raise InputError(f"{type(layer).__name__} returns no feature map; choose another layer")
    return result, outputs[0]


def min_max_normalize(values: Tensor) -> Tensor:
    """Scale each map to 0..1: (..., h, w)."""
    low, high = values.amin((-2, -1), keepdim=True), values.amax((-2, -1), keepdim=True)
    return (values - low) / (high - low).clamp_min(1e-8)


def grad_cam(
    model: nn.Module, layer: nn.Module, images: Tensor, target: Target, sample=None
) -> Tensor:
    """Return the Grad-CAM map (h, w) of a layer for one image (1, 3, H, W)."""
    images = images.detach().clone().requires_grad_()
    run = partial(score, model, images, target, sample)
    with torch.enable_grad():
        result, maps = run_with_map(layer, run)
        if not result.requires_grad:
            with WithoutDetach():
                result, maps = run_with_map(layer, run)
        if not result.requires_grad:  # the model does not detect the target
            return torch.zeros_like(maps[0, 0])
        (grad,) = torch.autograd.grad(result.sum(), maps)
    return min_max_normalize((grad.mean((2, 3), keepdim=True) * maps).sum(1)[0].relu()).detach()


@torch.no_grad()
def score_cam(
    model: nn.Module,
    layer: nn.Module,
    images: Tensor,
    target: Target,
    sample=None,
    max_channels=None,
) -> Tensor:
    """Return the ScoreCAM map (h, w) of a layer for one image; runs the model once a channel.

    With `max_channels`, only that many channels are used, whose maps vary most over the grid.
    """
    _, (maps,) = run_with_map(layer, partial(score, model, images, target, sample))
    if max_channels is not None:
        maps = maps[maps.flatten(1).var(1).topk(min(max_channels, len(maps))).indices]
    scores = []
    for chunk in maps.split(16):  # masks of all channels in the image's size would fill the memory
        masks = min_max_normalize(chunk)[:, None]
        masks = F.interpolate(masks, size=images.shape[2:], mode="bilinear")
        scores.append(score(model, masks * images, target, sample))  # of (16, 3, H, W) at most
    return min_max_normalize(torch.einsum("k,khw->hw", torch.cat(scores).softmax(0), maps).relu())
