"""Models as graphs for deployment: which parts become a graph, in which format, and whether it computes the same.

A graph holds tensors and plain operators alone, so what depends on data stays outside: anchors, box
decoding and NMS. A backbone, a classifier and a single-stage detector are one graph each. A
two-stage detector is up to three: `dense` up to the proposals' scores, `boxes` for proposals,
`masks` for the boxes kept.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmpretrain.models import ImageClassifier
from torch import Tensor, nn
from torchvision.ops import roi_align

from mrla_mm.errors import InputError

OPSET = 18
TOLERANCE = 1e-4


class Graph(NamedTuple):
    """A module, example inputs, and the names of inputs and outputs."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    input_names: list[str]
    output_names: list[str]


class Proposals(nn.Module):
    """Image (B, 3, H, W) -> the feature maps of a two-stage detector, then the scores and boxes of its proposals."""

    def __init__(self, model: TwoStageDetector) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Compute maps and proposal head."""
        maps = tuple(self.model.extract_feat(image))
        return (*maps, *flatten(self.model.rpn_head(maps)))


class PerRoI(nn.Module):
    """RoIs (K, 5), image index and corners in pixels, and maps of the levels -> what a RoI head computes of each RoI.

    mmdet pools each RoI from the level it belongs to, which depends on data; here every RoI is
    pooled from every level and the right result selected.
    """

    def __init__(self, extractor: SingleRoIExtractor, head: nn.Module) -> None:
        super().__init__()
        if any(layer.pool_mode != "avg" for layer in extractor.roi_layers):
            raise InputError("RoIAlign can be exported with pool_mode='avg' alone")
        self.extractor, self.head = extractor, head

    def forward(self, rois: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        """Pool the RoIs and run the head."""
        layers = self.extractor.roi_layers
        level = self.extractor.map_roi_levels(rois, len(layers))[:, None, None, None]
        pooled = 0.0
        for index, (layer, x) in enumerate(zip(layers, maps, strict=True)):
            found = roi_align(
                x, rois, layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
            )
            pooled = torch.where(level == index, found, pooled)
        return flatten(self.head(pooled))


def graphs_of(
    model: nn.Module, shape: tuple[int, int], *, backbone_only: bool = False
) -> dict[str, Graph]:
    """Cut a model into graphs, with example inputs for images of a shape (height, width).

    Raises:
        InputError: the model is neither a classifier nor a detector of a known kind.
    """
    model.eval()
    image = torch.rand(2, 3, *shape)
    if backbone_only:
        return {"backbone": image_graph(model.backbone, image, ["map"])}
    if isinstance(model, ImageClassifier):
        return {"logits": image_graph(model, image, ["logits"])}
    if isinstance(model, SingleStageDetector):
        return {"dense": image_graph(model, image, ["scores", "boxes"])}
    if (
        isinstance(model, TwoStageDetector)
        and model.with_rpn
        and type(model.roi_head) is StandardRoIHead
    ):
        return two_stage_graphs(model, image)
    raise InputError(
        f"{type(model).__name__} cannot be cut into graphs here; export its backbone alone (--backbone)"
    )


def image_graph(module: nn.Module, image: Tensor, kinds: Sequence[str]) -> Graph:
    """Graph of a module that takes an image; its outputs are named by kind and level."""
    with torch.no_grad():
        outputs = flatten(module(image))
    levels, rest = divmod(len(outputs), len(kinds))
    kinds, levels = (["output"], len(outputs)) if rest else (kinds, levels)
    names = (
        list(kinds)
        if levels == 1
        else [f"{kind}_{level}" for kind in kinds for level in range(levels)]
    )
    return Graph(module, (image,), ["image"], names)


def two_stage_graphs(model: TwoStageDetector, image: Tensor) -> dict[str, Graph]:
    """Graphs of a detector with region proposals: `dense`, `boxes` and, if there are any, `masks`."""
    head = model.roi_head
    dense = image_graph(Proposals(model), image, ["map", "scores", "boxes"])
    with torch.no_grad():
        maps = dense.module(image)[: len(dense.output_names) // 3]
    graphs = {"dense": dense}
    heads = dict(boxes=(head.bbox_roi_extractor, head.bbox_head, ["class_scores", "box_deltas"]))
    if head.with_mask:
        heads["masks"] = (head.mask_roi_extractor, head.mask_head, ["mask_logits"])
    for name, (extractor, roi_head, outputs) in heads.items():
        used = maps[: len(extractor.roi_layers)]
        inputs = ["rois", *(f"map_{level}" for level in range(len(used)))]
        graphs[name] = Graph(
            PerRoI(extractor, roi_head).eval(), (example_rois(7, image), *used), inputs, outputs
        )
    return graphs


def example_rois(count: int, image: Tensor) -> Tensor:
    """RoIs (count, 5) from small to as large as the image, over all images of the batch."""
    size, share = torch.tensor(image.shape[:1:-1]), torch.linspace(0.05, 1, count)[:, None]
    corners = (1 - share) * torch.tensor([0.3, 0.6]) * size
    return torch.cat(
        [torch.arange(count)[:, None] % len(image), corners, corners + share * size], dim=1
    )


def flatten(outputs: Tensor | np.ndarray | Sequence) -> tuple:
    """All tensors, or arrays, of nested tuples and lists, in order."""
    single = isinstance(outputs, Tensor | np.ndarray)
    return (outputs,) if single else tuple(t for part in outputs for t in flatten(part))


def other_inputs(graph: Graph, shape: tuple[int, int], batch: int) -> tuple[Tensor, ...]:
    """Random inputs of a graph for images of another shape and batch size than those of its example."""
    if graph.input_names == ["image"]:
        return (torch.rand(batch, 3, *shape),)
    scales = [layer.spatial_scale for layer in graph.module.extractor.roi_layers]
    sizes = [[math.ceil(side * scale) for side in shape] for scale in scales]
    maps = [
        torch.rand(batch, x.shape[1], *size)
        for x, size in zip(graph.inputs[1:], sizes, strict=True)
    ]
    return (example_rois(3 * batch, torch.empty(batch, 3, *shape)), *maps)


def to_program(graph: Graph, *, dynamic: bool) -> "torch.export.ExportedProgram":
    """Trace a graph with torch.export; with `dynamic`, for any batch and size."""
    axes = [(0, 2, 3) if x.dim() == 4 else (0,) for x in graph.inputs]
    first, *maps = [dict.fromkeys(each, torch.export.Dim.DYNAMIC) for each in axes]
    shapes = (first, tuple(maps)) if maps else (first,)  # the maps are one *argument
    return torch.export.export(
        graph.module, graph.inputs, dynamic_shapes=shapes if dynamic else None, strict=False
    )


def to_onnx(
    graph: Graph,
    path: str | Path,
    *,
    dynamic: bool,
    opset: int = OPSET,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a graph as an ONNX file with the metadata among its properties; needs the extra `deploy`."""
    names = dict(input_names=graph.input_names, output_names=graph.output_names)
    program = torch.onnx.export(
        to_program(graph, dynamic=dynamic), dynamo=True, verbose=False, opset_version=opset, **names
    )
    program.model.metadata_props.update(metadata or {})
    program.save(str(path), external_data=False)


def onnx_runner(graph: Graph, path: str | Path) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs an ONNX file with a graph's inputs, in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {
        value.name for value in session.get_inputs()
    }  # without inputs that the graph does not use

    def run(*inputs: Tensor) -> list[np.ndarray]:
        named = zip(graph.input_names, inputs, strict=True)
        return session.run(None, {name: tensor.numpy() for name, tensor in named if name in names})

    return run


def deviation(graph: Graph, run: Callable, inputs: Sequence[Tensor]) -> float:
    """Largest difference between what `run` and the module itself compute, over the largest magnitude if above 1."""
    with torch.no_grad():
        expected = flatten(graph.module(*inputs))
        found = [torch.as_tensor(output) for output in flatten(run(*inputs))]
    if [t.shape for t in expected] != [t.shape for t in found]:
        return math.inf
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)
