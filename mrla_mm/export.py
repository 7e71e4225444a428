"""Models as graphs for deployment: what becomes a graph, in which format, and whether it computes the same.

A graph holds tensors and plain operators alone, so what decides by data stays outside: anchors, box decoding and NMS.
A backbone, a classifier and a single-stage detector are one graph each. A two-stage detector is up to three, one for
each time its data decides: `dense` up to the proposals' scores, `boxes` for proposals, `masks` for the boxes kept.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmpretrain.models import ImageClassifier
from torch import Tensor, nn

from mrla_mm.errors import InputError

OPSET = 18
OPSETS = range(18, 26)  # what the exporter writes, each tried with torch 2.11 and onnxscript 0.7
TOLERANCE = 1e-4
IMAGE_AXES = {0: "batch", 2: "height", 3: "width"}


class Graph(NamedTuple):
    """A part of a model: its module, example inputs, their moving axes, and names of inputs and outputs."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    axes: tuple[dict[int, str], ...]
    input_names: list[str]
    output_names: list[str]


class Dense(nn.Module):
    """Image (B, 3, H, W) -> the maps of some levels, then what a dense head computes of each, list by list.

    Args:
        model: detector or classifier with `extract_feat`.
        head: dense head, None for maps alone.
        keeps_maps: put the maps out too, for the graphs that pool from them.
    """

    def __init__(self, model: nn.Module, head: nn.Module | None, *, keeps_maps: bool) -> None:
        super().__init__()
        self.model, self.head, self.keeps_maps = model, head, keeps_maps

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Compute maps and head."""
        maps = tuple(self.model.extract_feat(image))
        found = () if self.head is None else self.head(maps)
        lists = [found] if isinstance(found, Tensor) else [x for level in found for x in level]
        return (*(maps if self.keeps_maps else ()), *lists)


class Classifier(nn.Module):
    """Image (B, 3, H, W) -> the logits (B, classes)."""

    def __init__(self, model: ImageClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Compute the logits."""
        return self.model(image, mode="tensor")


class PerRoI(nn.Module):
    """RoIs (K, 5), image index and corners in pixels, and maps of the levels -> what a RoI head computes of each RoI.

    mmdet pools from each level the RoIs that belong there, which is a decision by data; here every level is pooled for
    every RoI and the level's result chosen.
    """

    def __init__(self, extractor: SingleRoIExtractor, head: nn.Module) -> None:
        super().__init__()
        for layer in extractor.roi_layers:
            if layer.pool_mode != "avg":
                raise InputError(f"RoIAlign with pool_mode={layer.pool_mode!r} cannot be exported; use 'avg'")
        self.extractor, self.head = extractor, head

    def forward(self, rois: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        """Pool the RoIs and run the head."""
        from torchvision.ops import roi_align

        used = maps[: len(self.extractor.roi_layers)]
        level = self.extractor.map_roi_levels(rois, len(used))[:, None, None, None]
        pooled = None
        for index, (layer, x) in enumerate(zip(self.extractor.roi_layers, used, strict=True)):
            found = roi_align(x, rois, layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned)
            pooled = found if pooled is None else torch.where(level == index, found, pooled)
        out = self.head(pooled)
        return out if isinstance(out, tuple) else (out,)


def graphs_of(model: nn.Module, shape: tuple[int, int], *, backbone_only: bool = False) -> dict[str, Graph]:
    """Cut a model into graphs, with example inputs for images of a shape (height, width).

    Raises:
        InputError: for a model whose parts are not known here.
    """
    model.eval()
    image = torch.rand(2, 3, *shape)
    if backbone_only and not hasattr(model, "backbone"):
        raise InputError(f"{type(model).__name__} has no backbone to export alone")
    if backbone_only:
        return {"backbone": image_graph(model.backbone, image, [])}
    if isinstance(model, ImageClassifier):
        return {"logits": image_graph(Classifier(model), image, ["logits"])}
    if isinstance(model, TwoStageDetector) and model.with_rpn:
        return two_stage_graphs(model, image)
    if isinstance(model, SingleStageDetector):
        return {"dense": image_graph(Dense(model, model.bbox_head, keeps_maps=False), image, ["scores", "boxes"])}
    raise InputError(f"{type(model).__name__} cannot be cut into graphs here; export its backbone alone (--backbone)")


def image_graph(module: nn.Module, image: Tensor, kinds: Sequence[str]) -> Graph:
    """Graph of a module that takes an image; its outputs are named by kind and level."""
    with torch.no_grad():
        outputs = flat(module(image))
    if not kinds or len(outputs) % len(kinds):
        kinds = ["map"] if not kinds else ["output"]
    levels = len(outputs) // len(kinds)
    names = list(kinds) if levels == 1 else [f"{kind}_{level}" for kind in kinds for level in range(levels)]
    return Graph(module, (image,), (IMAGE_AXES,), ["image"], names)


def two_stage_graphs(model: TwoStageDetector, image: Tensor) -> dict[str, Graph]:
    """Graphs of a detector with region proposals: `dense`, `boxes` and, if there are any, `masks`."""
    head = model.roi_head
    extractors = [head.bbox_roi_extractor] + ([head.mask_roi_extractor] if head.with_mask else [])
    plain = type(head) is StandardRoIHead and not head.with_shared_head
    if not plain or not all(type(extractor) is SingleRoIExtractor for extractor in extractors):
        raise InputError(
            f"{type(head).__name__} cannot be cut into graphs here; export the backbone alone (--backbone)"
        )
    dense = image_graph(Dense(model, model.rpn_head, keeps_maps=True), image, ["map", "scores", "boxes"])
    with torch.no_grad():
        maps = dense.module(image)[: len(dense.output_names) // 3]
    rois = example_rois(7, image)
    axes = ({0: "rois"}, *({0: "batch", 2: f"height_{i}", 3: f"width_{i}"} for i in range(len(maps))))
    parts = dict(boxes=(PerRoI(extractors[0], head.bbox_head), ["class_scores", "box_deltas"]))
    if head.with_mask:
        parts["masks"] = (PerRoI(extractors[1], head.mask_head), ["mask_logits"])
    found = {"dense": dense}
    for name, (module, outputs) in parts.items():
        used = maps[: len(module.extractor.roi_layers)]
        names = ["rois", *(f"map_{i}" for i in range(len(used)))]
        found[name] = Graph(module.eval(), (rois, *used), axes[: len(used) + 1], names, outputs)
    return found


def example_rois(number: int, image: Tensor) -> Tensor:
    """RoIs (number, 5) from small to as large as the image, over all images of the batch."""
    batch, (height, width) = len(image), image.shape[2:]
    share = torch.linspace(0.05, 1, number)
    left, top = (1 - share) * 0.3 * width, (1 - share) * 0.6 * height
    which = torch.arange(number) % batch
    return torch.stack([which.float(), left, top, left + share * width, top + share * height], dim=1)


def flat(outputs: Tensor | np.ndarray | Sequence) -> tuple:
    """All tensors, or arrays, of nested tuples and lists, in order."""
    single = isinstance(outputs, Tensor | np.ndarray)
    return (outputs,) if single else tuple(t for part in outputs for t in flat(part))


def other_inputs(graph: Graph, shape: tuple[int, int], batch: int) -> tuple[Tensor, ...]:
    """Inputs of a graph whose images are of another shape and batch size than its example, of the same strides."""
    generator = torch.Generator().manual_seed(batch)
    if graph.input_names == ["image"]:
        return (torch.rand(batch, *graph.inputs[0].shape[1:2], *shape, generator=generator),)
    image, maps = torch.empty(batch, 3, *shape), graph.inputs[1:]
    strides = [layer.spatial_scale for layer in graph.module.extractor.roi_layers]
    sizes = [[math.ceil(side * scale) for side in shape] for scale in strides]
    drawn = [torch.rand(batch, x.shape[1], *size, generator=generator) for x, size in zip(maps, sizes, strict=True)]
    return (example_rois(3 * batch, image), *drawn)


def to_program(graph: Graph, *, dynamic: bool) -> torch.export.ExportedProgram:
    """Trace a graph with torch.export; with `dynamic`, for any batch and size."""
    shapes = moving(graph) if dynamic else None
    return torch.export.export(graph.module, graph.inputs, dynamic_shapes=shapes, strict=False)


def moving(graph: Graph) -> tuple:
    """Moving axes in the form that torch.export takes; an axis that the model fixes is an error, not a surprise."""
    shapes = [{axis: torch.export.Dim.DYNAMIC for axis in axes} for axes in graph.axes]
    return (shapes[0],) if len(shapes) == 1 else (shapes[0], tuple(shapes[1:]))  # the maps are one *argument


def check_onnx(opset: int) -> None:
    """Raise InputError unless the packages that write and run ONNX are installed and the opset is one of `OPSETS`."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise InputError(f"ONNX needs the extra deploy ({', '.join(missing)} missing): pip install 'mrla_mm[deploy]'")
    if opset not in OPSETS:
        raise InputError(f"opset {opset}: {OPSETS[0]} to {OPSETS[-1]} were tried, give one of them")


def to_onnx(
    graph: Graph, path: str | Path, *, dynamic: bool, opset: int = OPSET, metadata: dict[str, str] | None = None
) -> None:
    """Write a graph as an ONNX file, the metadata among its properties.

    Raises:
        InputError: from `check_onnx`; or the exporter kept another opset than the one asked for.
    """
    check_onnx(opset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            to_program(graph, dynamic=dynamic),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=graph.input_names,
            output_names=graph.output_names,
        )
    written = program.model.opset_imports[""]
    if written != opset:  # it warns, and goes on with what it has
        raise InputError(f"opset {opset}: this torch and onnxscript write opset {written} instead; ask for {written}")
    program.model.metadata_props.update(metadata or {})
    program.save(str(path), external_data=False)


def opset_of(path: str | Path) -> int:
    """Return the version of ONNX's operators that a file says it needs."""
    import onnx

    return next(entry.version for entry in onnx.load(path).opset_import if entry.domain in ("", "ai.onnx"))


def in_onnxruntime(graph: Graph, path: str | Path) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs an ONNX file on the CPU with a graph's inputs.

    Raises:
        InputError: onnxruntime has no implementation of an operator of the file's opset.
    """
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Lacking

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Lacking as error:
        raise InputError(
            f"{path} is written but not checked: onnxruntime {onnxruntime.__version__} does not run its opset "
            f"{opset_of(path)} ({str(error).rpartition(' : ')[2]}); ask for a lower one, {OPSET} is the default"
        ) from error
    taken = {value.name for value in session.get_inputs()}

    def run(*inputs: Tensor) -> list[np.ndarray]:
        named = zip(graph.input_names, inputs, strict=True)
        return session.run(None, {name: tensor.numpy() for name, tensor in named if name in taken})

    return run


def deviation(graph: Graph, run: Callable, inputs: Sequence[Tensor]) -> float:
    """Largest difference between what `run` and the module itself compute, over the largest magnitude if above 1.

    Raises:
        InputError: the numbers of outputs or their shapes differ.
    """
    with torch.no_grad():
        expected = flat(graph.module(*inputs))
        found = [torch.as_tensor(output) for output in flat(run(*inputs))]
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (expected, found)]
    if shapes[0] != shapes[1]:
        raise InputError(f"the exported graph puts out {shapes[1]} where the model puts out {shapes[0]}")
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)
