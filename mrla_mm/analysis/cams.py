"""What in an image speaks for a prediction: Grad-CAM and ScoreCAM of a backbone's stages (the paper's App. B.5).

torchcam computes the maps. It wants a model that turns images into a score for each, which `Explained` makes of a
classifier or a detector. The score is

* of a classifier, the logit of a class;
* of a detector, the log-odds log(p / (1 - p)) of the score p (after softmax or sigmoid) of the best detection of a
  class whose box overlaps a given one with an IoU of at least 0.5; p = 0.001 if there is none.

ScoreCAM weighs maps by a softmax over scores, among which probabilities would all count alike.
"""

import copy
from collections.abc import Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import torch
from mmdet.structures.bbox import bbox_overlaps
from torch import Tensor, nn

from mrla_mm.analysis.models import LoadedModel, Prepared
from mrla_mm.errors import InputError

MIN_IOU = 0.5
LEAST_SCORE = 1e-3
METHODS = {"gradcam": ("Grad-CAM", "GradCAM"), "scorecam": ("ScoreCAM", "ScoreCAM")}


class Target(NamedTuple):
    """What is to be explained: a class, and for detectors the box (4,) in pixels of what the model sees."""

    label: int
    box: Tensor | None = None


class CamMap(NamedTuple):
    """A map (h, w) from 0 to 1 over the padded input, by a method at a layer."""

    method: str
    layer: str
    values: Tensor


class Explained(nn.Module):
    """Scores images by what a target says, and shows layers to torchcam.

    A layer's output passes through a probe, an identity module that torchcam listens to: so layers may put out tuples.

    Args:
        loaded: classifier or detector.
        prepared: image, whose size and scale a detector needs to know.
        target: what to score.
        layers: names of modules in the backbone that put out maps (B, C, H, W), alone or first in a tuple.
    """

    def __init__(self, loaded: LoadedModel, prepared: Prepared, target: Target, layers: Sequence[str]) -> None:
        super().__init__()
        self.loaded, self.prepared, self.target, self.layers = loaded, prepared, target, tuple(layers)
        self.model = loaded.model
        self.probes = nn.ModuleList(nn.Identity() for _ in layers)
        self.shown: dict[str, Tensor] = {}  # layer: indices of the channels its probe sees, all where there are none

    @contextmanager
    def probing(self):
        """Let the probes see what the layers put out."""
        handles = [
            self.model.backbone.get_submodule(name).register_forward_hook(self._pass_through(probe, name))
            for name, probe in zip(self.layers, self.probes, strict=True)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _pass_through(self, probe: nn.Module, name: str):
        def hook(module, args, output):
            if first_map(output).dim() != 4:
                shape = tuple(first_map(output).shape)
                raise InputError(f"--layers {name} puts out {shape}, not a map (B, C, H, W): name another part")
            if name in self.shown:
                probe(first_map(output)[:, self.shown[name]])
                return None
            probed = probe(first_map(output))
            return probed if isinstance(output, Tensor) else (probed, *output[1:])

        return hook

    def scores(self, images: Tensor) -> Tensor:
        """Score images by logit, or by the detection's own score: (B, 3, H, W) -> (B,)."""
        if not self.loaded.is_detector:
            return self.model(images, mode="tensor")[:, self.target.label]
        found = detect(self.loaded, images, self.prepared)
        return torch.stack([overlap_score(instances, self.target, images) for instances in found])

    def forward(self, images: Tensor) -> Tensor:
        """Score images for torchcam: (B, 3, H, W) -> (B, 1)."""
        scores = self.scores(images)
        return (log_odds(scores) if self.loaded.is_detector else scores)[:, None]


def log_odds(score: Tensor) -> Tensor:
    """Return log(p / (1 - p)), finite for all p from 0 to 1."""
    return torch.logit(score.clamp(LEAST_SCORE, 1 - 1e-6))


def first_map(output) -> Tensor:
    """Return the tensor that a layer puts out, alone or first in a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def detect(loaded: LoadedModel, images: Tensor, prepared: Prepared) -> list:
    """Return the detections in each of a batch of images of one size, in their pixels, without masks."""
    samples = [copy.deepcopy(prepared.samples[0]) for _ in images]
    roi_head = getattr(loaded.model, "roi_head", None)
    mask_head = getattr(roi_head, "mask_head", None)
    if mask_head is not None:
        roi_head.mask_head = None  # masks change no score and cost most of the time
    try:
        return [sample.pred_instances for sample in loaded.model.predict(images, samples, rescale=False)]
    finally:
        if mask_head is not None:
            roi_head.mask_head = mask_head


def overlap_score(instances, target: Target, images: Tensor) -> Tensor:
    """Score () of the best detection of the target's class that overlaps its box, 0 if there is none."""
    if len(instances) == 0:
        return images.new_zeros(())
    overlaps = bbox_overlaps(instances.bboxes.detach(), target.box[None].to(instances.bboxes))[:, 0]
    scores = instances.scores[(instances.labels == target.label) & (overlaps >= MIN_IOU)]
    return scores.max() if len(scores) else images.new_zeros(())


@torch.no_grad()
def choose_target(loaded: LoadedModel, prepared: Prepared, label: int | None = None) -> Target | None:
    """Return a classifier's likeliest class or a detector's best detection, of a class if one is given, or None.

    Raises:
        InputError: the classifier has no class of that number.
    """
    if not loaded.is_detector:
        logits = loaded.model(prepared.inputs, mode="tensor")
        if label is not None and label >= logits.shape[1]:
            raise InputError(f"--class {label}: the model has the classes 0 to {logits.shape[1] - 1}")
        return Target(int(logits.argmax()) if label is None else label)
    (instances,) = detect(loaded, prepared.inputs, prepared)
    if label is not None:
        instances = instances[instances.labels == label]
    if len(instances) == 0:
        return None
    best = int(instances.scores.argmax())
    return Target(int(instances.labels[best]), instances.bboxes[best])


@torch.no_grad()
def stage_ends(model: nn.Module, images: Tensor) -> list[str]:
    """Names of the backbone's parts that put out the last map of each resolution, finest first: its stages.

    Raises:
        InputError: the backbone has no such parts.
    """
    backbone, last, handles = model.backbone, {}, []
    parts = dict(backbone.named_children())
    lists = {name: part for name, part in parts.items() if isinstance(part, nn.ModuleList)}
    parts |= {f"{name}.{index}": part for name, entries in lists.items() for index, part in enumerate(entries)}

    def keep(name):
        def hook(module, args, output):
            if isinstance(output, Tensor) and output.dim() == 4:
                last[tuple(output.shape[2:])] = name

        return hook

    for name, part in parts.items():
        handles.append(part.register_forward_hook(keep(name)))
    try:
        model.extract_feat(images)
    finally:
        for handle in handles:
            handle.remove()
    ordered = [last[grid] for grid in sorted(last, key=lambda grid: -grid[0] * grid[1]) if grid[0] * grid[1] > 1]
    if len(ordered) < 2:
        raise InputError(
            f"the stages of {type(backbone).__name__} put out no maps to explain: name layers of its backbone that do "
            "with --layers, or for a transformer use tools/visualize_vit_attention.py"
        )
    return ordered


def check_layers(model: nn.Module, layers: Sequence[str]) -> None:
    """Raise InputError unless the backbone has parts of these names."""
    known = dict(model.backbone.named_modules())
    for name in layers:
        if name not in known:
            some = ", ".join(name for name, _ in model.backbone.named_children())
            raise InputError(f"--layers {name}: the backbone has no such part; its own are {some}")


def explain(
    loaded: LoadedModel,
    prepared: Prepared,
    target: Target,
    *,
    layers: Sequence[str],
    methods: Sequence[str] = ("gradcam", "scorecam"),
    max_channels: int | None = None,
    batch_size: int = 16,
) -> tuple[float, list[CamMap]]:
    """Return the target's logit or detection score in an image, and its maps by method and layer, none if not found.

    ScoreCAM runs the model once for each channel of a layer.

    Args:
        loaded: classifier or detector.
        prepared: image.
        target: what to explain.
        layers: names of modules in the backbone.
        methods: of `METHODS`.
        max_channels: of a layer that ScoreCAM runs, those whose maps vary most over the grid; all by default.
        batch_size: images at a time for ScoreCAM.

    Raises:
        InputError: torchcam is not installed, or the score does not depend on a layer.
    """
    methods_module = import_torchcam()
    explained = Explained(loaded, prepared, target, layers)
    names = [f"probes.{index}" for index in range(len(layers))]
    maps = []
    with explained.probing():
        score = score_of(explained, prepared.inputs, max_channels)
        if loaded.is_detector and score == 0:
            return score, []
        for method in methods:
            title, class_name = METHODS[method]
            by_gradient = method == "gradcam"
            shown, explained.shown = explained.shown, {} if by_gradient else explained.shown
            arguments = {} if by_gradient else dict(batch_size=batch_size)
            with getattr(methods_module, class_name)(explained, names, **arguments) as extractor:
                images = prepared.inputs.detach().clone().requires_grad_(by_gradient)
                with torch.set_grad_enabled(by_gradient):
                    scores = explained(images)
                try:
                    found = extractor(0, scores)
                except RuntimeError as error:
                    raise InputError(f"{title}: the score does not depend on {', '.join(layers)} ({error})") from error
            explained.shown = shown
            maps += [CamMap(title, layer, cam[0].detach().cpu()) for layer, cam in zip(layers, found, strict=True)]
    return score, maps


@torch.no_grad()
def score_of(explained: Explained, images: Tensor, max_channels: int | None) -> float:
    """Score an image, and choose the channels that the probes show where there are more than `max_channels`."""
    seen = {}
    handles = [
        probe.register_forward_hook(lambda module, args, output, name=name: seen.__setitem__(name, output))
        for name, probe in zip(explained.layers, explained.probes, strict=True)
    ]
    score = float(explained.scores(images))
    for handle in handles:
        handle.remove()
    for name, output in seen.items():
        if max_channels is not None and output.shape[1] > max_channels:
            explained.shown[name] = output[0].flatten(1).var(1).topk(max_channels).indices.sort().values
    return score


def import_torchcam():
    """Return torchcam.methods.

    Raises:
        InputError: it is not installed, or older than 0.4, whose ScoreCAM would turn every score into a 1.
    """
    remedy = "pip install 'mrla_mm[cam]', which on Python 3.10 brings numpy 1"
    try:
        methods, found = import_module("torchcam.methods"), version("torchcam")
    except ImportError as error:
        raise InputError(f"class activation maps need torchcam: {remedy}") from error
    if tuple(int(part) for part in found.split(".")[:2]) < (0, 4):
        raise InputError(f"torchcam {found} is too old, class activation maps need 0.4 or later: {remedy}")
    return methods
