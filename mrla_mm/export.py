"""Trained models as one graph each, for ONNX and torch.export.

A detector's graph takes images as OpenCV reads them and returns boxes: normalisation, padding,
anchors, box decoding and NMS are part of it. It computes what mmdet's `predict` does, for a whole
batch at once. Outputs have `max_per_img` rows an image; rows after the last detection have score 0
and label -1. Batch, height and width are dynamic.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import RPNHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn
from torchvision.ops import nms, roi_align

from mrla_mm.errors import InputError

Size = tuple[int, int]  # height and width of an image
TOLERANCE = 1e-4  # of feature maps and logits, relative to the largest
BOX_TOLERANCE = 1e-2  # of boxes, in pixels, and of masks
# What of mmdet's classes `Detect` follows; a class with its own is refused.
PREDICTION = """predict predict_by_feat _predict_by_feat_single _bbox_post_process predict_bbox
    predict_mask _bbox_forward"""


class Graph(NamedTuple):
    """A module that takes one tensor, `image`."""

    module: nn.Module
    images: list[Tensor]  # of noise to compare on; the first is traced
    axes: dict[int, str]  # dynamic dimensions of the image; empty if the size is fixed
    outputs: list[str]


class Preprocess(nn.Module):
    """What a data preprocessor does to images as OpenCV reads them."""

    def __init__(self, preprocessor: nn.Module) -> None:
        super().__init__()
        self.preprocessor = preprocessor

    def forward(self, image: Tensor) -> Tensor:
        """Convert, normalise and pad: (B, H, W, 3) uint8 -> (B, 3, H', W')."""
        settings = self.preprocessor  # mmdet's or mmpretrain's
        x = image.permute(0, 3, 1, 2).float().contiguous()
        if getattr(settings, "_channel_conversion", getattr(settings, "to_rgb", False)):
            x = x.flip(1)
        if settings._enable_normalize:
            x = (x - settings.mean) / settings.std
        height, width = x.shape[2:]
        divisor = settings.pad_size_divisor
        padding = (0, -width % divisor, 0, -height % divisor)
        return F.pad(x, padding, value=float(settings.pad_value))


class Detect(nn.Module):
    """Images (B, H, W, 3) -> boxes (B, K, 4), scores (B, K), labels (B, K); masks (B, K, h, w)."""

    def __init__(self, model: SingleStageDetector | TwoStageDetector) -> None:
        super().__init__()
        check_detector(model)
        self.model = model
        self.preprocess = Preprocess(model.data_preprocessor)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Detect objects."""
        maps = self.model.extract_feat(self.preprocess(image))
        shape = image.shape[1:3]
        if not isinstance(self.model, TwoStageDetector):
            return detect_dense(self.model.bbox_head, maps, shape)
        proposals, scores, _ = detect_dense(self.model.rpn_head, maps, shape)
        return detect_in_proposals(self.model.roi_head, maps, shape, proposals, scores > 0)


def detect_dense(head: BaseDenseHead, maps: Sequence[Tensor], shape: Size) -> tuple[Tensor, ...]:
    """Run a dense head on maps of images of a shape, as mmdet predicts with it."""
    scores, deltas, *rest = head(maps)
    factors = rest[0] if rest else [None] * len(scores)
    sizes = [level.shape[2:] for level in scores]
    priors = head.prior_generator.grid_priors(sizes, scores[0].dtype, scores[0].device)
    levels = []
    for number, level in enumerate(zip(scores, deltas, factors, priors, strict=True)):
        boxes, level_scores, labels = best_of_level(head, level, shape)
        if isinstance(head, RPNHead):  # proposals suppress others of their level only
            labels = torch.full_like(labels, number)
        levels.append((boxes, level_scores, labels))
    boxes, scores, labels = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    return suppress(boxes, scores, labels, head.test_cfg)


def best_of_level(head: BaseDenseHead, level: Sequence, shape: Size) -> tuple[Tensor, ...]:
    """Decode the `nms_pre` best boxes of a level: class scores, boxes, score factors, priors.

    Every level is padded with as many boxes of score 0, so that topk has enough to choose from at
    any image size.
    """
    logits, deltas, factors, priors = level
    count = head.test_cfg.nms_pre
    padding = (0, 0, 0, count)
    logits = per_prior(logits, head.cls_out_channels)
    scores = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[..., :-1]
    classes = scores.shape[2]
    scores, index = F.pad(scores, padding).flatten(1).topk(count, dim=1)
    scores = scores * (scores > head.test_cfg.get("score_thr", 0))
    prior = index // classes
    if factors is not None:
        factors = F.pad(per_prior(factors, 1).sigmoid(), padding)
        scores = scores * take(factors, prior)[..., 0]
    deltas = take(F.pad(per_prior(deltas, 4), padding), prior)
    priors = F.pad(priors, padding)[prior]
    boxes = head.bbox_coder.decode(priors.flatten(0, 1), deltas.flatten(0, 1), max_shape=shape)
    return boxes.unflatten(0, (-1, count)), scores, index % classes


def pool(extractor: SingleRoIExtractor, maps: Sequence[Tensor], boxes: Tensor) -> Tensor:
    """Pool boxes (B, K, 4) with RoIAlign, flattened to B * K regions."""
    batch, count = boxes.shape[:2]
    image = torch.arange(batch, device=boxes.device).to(boxes)
    rois = torch.cat([image[:, None, None].expand(-1, count, 1), boxes], -1).flatten(0, 1)
    layers = extractor.roi_layers
    levels = extractor.map_roi_levels(rois, len(layers))
    pooled = maps[0].new_zeros(rois.shape[0], maps[0].shape[1], *layers[0].output_size)
    for number, (layer, x) in enumerate(zip(layers, maps, strict=False)):
        (at,) = (levels == number).nonzero(as_tuple=True)
        settings = layer.spatial_scale, layer.sampling_ratio, layer.aligned
        pooled = pooled.index_put((at,), roi_align(x, rois[at], layer.output_size, *settings))
    return pooled


def detect_in_proposals(
    roi_head: StandardRoIHead, maps: Sequence[Tensor], shape: Size, proposals: Tensor, valid: Tensor
) -> tuple[Tensor, ...]:
    """Detect in proposals (B, P, 4), of which those that are not `valid` are padding."""
    head = roi_head.bbox_head
    count = proposals.shape[1]
    logits, deltas = head(pool(roi_head.bbox_roi_extractor, maps, proposals))
    scores = logits.softmax(-1)[:, :-1].unflatten(0, (-1, count)) * valid[..., None]
    scores = scores * (scores > roi_head.test_cfg.score_thr)
    per_roi = 1 if head.reg_class_agnostic else head.num_classes
    priors = proposals.flatten(0, 1).repeat_interleave(per_roi, dim=0)
    boxes = head.bbox_coder.decode(priors, deltas.reshape(-1, 4), max_shape=shape)
    boxes = boxes.reshape(-1, count, per_roi, 4).expand(-1, -1, head.num_classes, 4)
    labels = torch.arange(head.num_classes, device=scores.device).expand(scores.shape)
    detections = boxes.flatten(1, 2), scores.flatten(1), labels.flatten(1)
    boxes, scores, labels = suppress(*detections, roi_head.test_cfg)
    if not roi_head.with_mask:
        return boxes, scores, labels
    masks = roi_head.mask_head(pool(roi_head.mask_roi_extractor, maps, boxes)).sigmoid()
    label = labels.flatten().clamp(0, masks.shape[1] - 1)  # masks are (B * K, classes or 1, h, w)
    masks = masks[torch.arange(label.shape[0], device=label.device), label]
    return boxes, scores, labels, masks.unflatten(0, labels.shape)


def check_detector(model: nn.Module) -> None:
    """Raise InputError for a detector that predicts in another way than `Detect` does."""
    if isinstance(model, TwoStageDetector) and model.with_rpn:
        roi_head = model.roi_head
        parts = [(model, TwoStageDetector), (model.rpn_head, RPNHead), (roi_head, StandardRoIHead)]
        parts.append((getattr(roi_head, "bbox_head", None), BBoxHead))
        parts.append((getattr(roi_head, "bbox_roi_extractor", None), SingleRoIExtractor))
        if roi_head.with_mask:
            parts.append((roi_head.mask_head, FCNMaskHead))
            parts.append((roi_head.mask_roi_extractor, SingleRoIExtractor))
    else:
        parts = [(model, SingleStageDetector), (getattr(model, "bbox_head", None), BaseDenseHead)]
    for part, base in parts:
        if not predicts_as(part, base):
            names = f"{type(model).__name__} with this {type(part).__name__}"
            raise InputError(f"{names} cannot be exported; export its backbone with --backbone")
    if any(getattr(layer, "pool_mode", "avg") != "avg" for layer in model.modules()):
        raise InputError("RoIAlign can be exported with pool_mode='avg' only")


def predicts_as(part: nn.Module | None, base: type) -> bool:
    """Whether a part of a detector predicts as mmdet's class does, with settings we follow."""
    names = ("forward",) if base is SingleRoIExtractor else PREDICTION.split()
    methods = [name for name in names if hasattr(base, name)]
    settings = {"type": "nms", **(getattr(part, "test_cfg", None) or {}).get("nms", {})}
    return (
        isinstance(part, base)
        and all(getattr(type(part), name) == getattr(base, name) for name in methods)
        and settings["type"] == "nms"
        and settings.keys() <= {"type", "iou_threshold"}
        and not getattr(getattr(part, "loss_cls", None), "custom_cls_channels", False)
        and not getattr(part, "with_shared_head", False)
    )


def per_prior(x: Tensor, channels: int) -> Tensor:
    """Lay out a head's map by prior: (B, A * channels, H, W) -> (B, H * W * A, channels)."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, channels)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take rows of each image: (B, N, D) and (B, K) -> (B, K, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def suppress(
    boxes: Tensor, scores: Tensor, labels: Tensor, settings: Mapping
) -> tuple[Tensor, ...]:
    """Keep the best `max_per_img` boxes that score above 0 after NMS: (B, N, ...) -> (B, K, ...).

    One call does NMS for all images and labels. Boxes are moved along x by their label and along y
    by their image, so that only those of one image and label overlap.
    """
    if (smallest := settings.get("min_bbox_size", -1)) >= 0:
        scores = scores * (boxes[..., 2:] - boxes[..., :2] > smallest).all(-1)
    image, row = (scores > 0).nonzero(as_tuple=True)
    offset = torch.stack([labels[image, row], image], 1) * (boxes.max() + 1)
    moved = boxes[image, row] + offset.repeat(1, 2)
    kept = nms(moved, scores[image, row], settings.nms.iou_threshold)
    image, row = image[kept], row[kept]
    scores = torch.zeros_like(scores).index_put((image, row), scores[image, row])
    missing = max(0, settings.max_per_img - scores.shape[1])
    scores, index = F.pad(scores, (0, missing)).topk(settings.max_per_img, dim=1)
    boxes = take(F.pad(boxes, (0, 0, 0, missing)), index) * (scores > 0)[..., None]
    labels = F.pad(labels, (0, missing)).gather(1, index)
    return boxes, scores, torch.where(scores > 0, labels, -1)


def make_graph(
    model: nn.Module, shape: Size | None = None, *, backbone_only: bool = False
) -> Graph:
    """Return the graph of a model, for one image of a shape (height, width), or for any batch.

    A backbone takes normalised images (B, 3, H, W); other models take images as OpenCV reads them.
    """
    sizes = [(1, *shape)] if shape else [(2, 256, 320), (1, 200, 352), (3, 128, 96)]
    images = [torch.randint(256, (*size, 3), dtype=torch.uint8) for size in sizes]
    axes = {0: "batch", 1: "height", 2: "width"}
    if backbone_only:
        module = model.backbone
        images = [torch.randn(batch, 3, height, width) for batch, height, width in sizes]
        names = [f"map_{level}" for level in range(len(as_tuple(module.eval()(images[0]))))]
        axes = {0: "batch", 2: "height", 3: "width"}
    elif "ImageClassifier" in [each.__name__ for each in type(model).__mro__]:  # of mmpretrain
        module = nn.Sequential(Preprocess(model.data_preprocessor), model)
        names = ["logits"]
    else:
        module = Detect(model)
        names = ["boxes", "scores", "labels"]
        names += ["masks"] if model.with_mask else []
    return Graph(module.eval(), images, {} if shape else axes, names)


def to_program(graph: Graph) -> "torch.export.ExportedProgram":
    """Trace a graph with torch.export."""
    dynamic = dict.fromkeys(graph.axes, torch.export.Dim.DYNAMIC)
    options = dict(dynamic_shapes=(dynamic,) if dynamic else None, strict=False)
    with torch.no_grad():
        return torch.export.export(graph.module, (graph.images[0],), **options)


def to_onnx(graph: Graph, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a graph and metadata as an ONNX file; needs the extra `optional`."""
    names = dict(input_names=["image"], output_names=graph.outputs)
    dynamic = (graph.axes,) if graph.axes else None
    options = dict(opset_version=18, dynamic_shapes=dynamic, dynamo=True, verbose=False)
    program = torch.onnx.export(to_program(graph), **names, **options)
    program.model.metadata_props.update(metadata or {})
    program.save(str(path), external_data=False)


def onnx_runner(path: str | Path) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs an ONNX file in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image: list(map(torch.from_numpy, session.run(None, {"image": image.numpy()})))


def check_same(graph: Graph, run: Callable, image: Tensor) -> str:
    """Say how close `run` comes to the graph's module; InputError if it does not."""
    with torch.no_grad():
        expected, found = as_tuple(graph.module(image)), as_tuple(run(image))
    shapes = [tuple(x.shape) for x in found]
    if shapes != [tuple(x.shape) for x in expected]:
        raise InputError(f"outputs have other shapes than the model's: {shapes}")
    compare = compare_detections if graph.outputs[0] == "boxes" else compare_values
    is_same, line = compare(expected, found)
    if not is_same:
        raise InputError(f"the export does not compute what the model does: {line}")
    return line


def compare_detections(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[bool, str]:
    """Say how many detections are in both, in any order: near ties may change it."""
    boxes, scores, labels = expected[:3]
    distance = (boxes[:, :, None] - found[0][:, None]).abs().amax(-1)  # (B, K, K)
    distance += (scores[:, :, None] - found[1][:, None]).abs()
    distance[labels[:, :, None] != found[2][:, None]] = torch.inf
    nearest = distance.min(-1)
    agrees = nearest.values < BOX_TOLERANCE  # (B, K)
    for masks, others in zip(expected[3:], found[3:], strict=True):  # (B, K, h, w)
        matched = take(others.flatten(2), nearest.indices).view_as(masks)
        agrees &= (masks - matched).abs().amax((2, 3)) < BOX_TOLERANCE
    agreed = int(agrees[scores > 0].sum())
    count = int(max((scores > 0).sum(), (found[1] > 0).sum()))
    line = f"{agreed} of {count} detections agree within {BOX_TOLERANCE} pixels"
    return agreed >= 0.95 * count, line


def compare_values(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[bool, str]:
    """Say how far any output is from the expected one, relative to its largest value."""
    pairs = zip(expected, found, strict=True)
    differences = [(a - b).abs().max() / a.abs().max().clamp(min=1) for a, b in pairs]
    worst = torch.stack(differences).max()  # NaN if any is, unlike Python's max
    return bool(worst <= TOLERANCE), f"largest difference to the model: {worst:.1e}"


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a module as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
