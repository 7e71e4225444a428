"""Trained models as graphs of plain operators, for torch.export and ONNX.

A graph takes images as the backbone does, normalised and padded, (B, 3, H, W). It returns a
backbone's maps, a classifier's logits, or the maps of a one-stage detector's head, before anything
is decoded. Batch, height and width are dynamic.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from mmdet.models.detectors import SingleStageDetector
from torch import Tensor, nn

from mrla_mm.errors import InputError

Size = tuple[int, int]  # height and width of an image
TOLERANCE = 1e-4  # of outputs, relative to the largest
AXES = {0: "batch", 2: "height", 3: "width"}


class RawOutputs(nn.Module):
    """What a model returns before post-processing, as a flat tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Run the model on images (B, 3, H, W)."""
        return flatten(self.model(image, mode="tensor"))


def select_module(model: nn.Module, *, backbone_only: bool = False) -> nn.Module:
    """Return what is exported of a model, in evaluation mode.

    Raises InputError for detectors that decode boxes in the middle of their network.
    """
    if backbone_only:
        return model.backbone.eval()
    is_classifier = "ImageClassifier" in [each.__name__ for each in type(model).__mro__]
    if not (is_classifier or isinstance(model, SingleStageDetector)):
        name = type(model).__name__
        raise InputError(f"{name} cannot be exported as a whole: add --backbone for its backbone")
    return RawOutputs(model).eval()


def random_images(size: Size | None = None) -> list[Tensor]:
    """Return noise to trace and compare on: of one size, or of several batches and sizes."""
    sizes = [(1, *size)] if size else [(2, 256, 320), (1, 192, 352), (3, 160, 224)]
    return [torch.randn(batch, 3, height, width) for batch, height, width in sizes]


def to_program(module: nn.Module, size: Size | None = None) -> "torch.export.ExportedProgram":
    """Trace a module with torch.export, for one image of a size or for any batch."""
    dynamic = None if size else (dict.fromkeys(AXES, torch.export.Dim.DYNAMIC),)
    image, *_ = random_images(size)
    with torch.no_grad():
        return torch.export.export(module, (image,), dynamic_shapes=dynamic, strict=False)


def to_onnx(
    module: nn.Module,
    path: str | Path,
    size: Size | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a module and metadata as an ONNX file; needs the extra `optional`."""
    program = to_program(module, size)
    names = [f"map_{index}" for index in range(len(program.graph_signature.user_outputs))]
    exported = torch.onnx.export(
        program,
        input_names=["image"],
        output_names=names,
        opset_version=18,
        dynamic_shapes=None if size else (AXES,),
        dynamo=True,
        verbose=False,
    )
    exported.model.metadata_props.update(metadata or {})
    exported.save(str(path), external_data=False)


def onnx_runner(path: str | Path) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs an ONNX file in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image: list(map(torch.from_numpy, session.run(None, {"image": image.numpy()})))


def check_same(module: nn.Module, run: Callable, image: Tensor) -> float:
    """Return how far `run` is from the module, relative to its largest output.

    Raises InputError above `TOLERANCE`, and for other shapes.
    """
    with torch.no_grad():
        expected = flatten(module(image))
        found = flatten(run(image))
    shapes = [tuple(x.shape) for x in found]
    if shapes != [tuple(x.shape) for x in expected]:
        raise InputError(f"outputs have other shapes than the model's: {shapes}")
    pairs = zip(expected, found, strict=True)
    differences = [(a - b).abs().max() / a.abs().max().clamp(min=1e-6) for a, b in pairs]
    worst = torch.stack(differences).max()  # NaN if any is, unlike Python's max
    if not worst <= TOLERANCE:
        raise InputError(f"the export does not compute what the model does, off by {worst:.1e}")
    return float(worst)


def flatten(outputs: Tensor | Sequence) -> tuple[Tensor, ...]:
    """Return the tensors of nested sequences in order."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    return tuple(chain.from_iterable(map(flatten, outputs)))
