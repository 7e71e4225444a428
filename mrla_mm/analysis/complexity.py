"""Parameters and multiply-adds of detectors and classifiers, from their configs alone; the rule is in `counting`."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mrla_mm.analysis.counting import OperationCounter, overridden
from mrla_mm.errors import InputError
from mrla_mm.ops.dispatch import ENVIRONMENT

RULE = (
    "Unit: multiply-adds (G = 10^9), for one image. Counted: every multiply-add and every elementwise product, "
    "quotient or square; additions, comparisons, exponentials and movements of data are free. Models are in eval mode; "
    "two-stage detectors get as many proposals as their test_cfg allows (1000), their masks 100, and pooling the "
    "regions is free."
)


@dataclass(frozen=True)
class Complexity:
    """What a model has and does.

    Attributes:
        parameters: number by name of the module that holds them, each parameter once.
        trainable: of all parameters, how many are not frozen.
        operations: multiply-adds by (name of the module that runs them, kind of operator).
        unknown: calls of operators that the counting rule does not name.
    """

    parameters: Mapping[str, int]
    trainable: int
    operations: Mapping[tuple[str, str], int]
    unknown: Mapping[str, int]

    @property
    def total_parameters(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def total(self) -> int:
        """All multiply-adds."""
        return sum(self.operations.values())

    def by_kind(self) -> Counter[str]:
        """Multiply-adds by kind of operator."""
        counts = Counter()
        for (_, kind), count in self.operations.items():
            counts[kind] += count
        return counts

    def by_module(self, max_depth: int | None = None) -> dict[str, tuple[int, int]]:
        """Parameters and multiply-adds of each module with all below it, in the model's order; "" is the whole model.

        Args:
            max_depth: dots and one in the longest name shown; None for all.
        """
        table: dict[str, list[int]] = {"": [0, 0]}
        entries = [(name, 0, count) for name, count in self.parameters.items()]
        entries += [(name, 1, count) for (name, _), count in self.operations.items()]
        for name, column, count in entries:
            parts = name.split(".") if name else []
            for depth in range(len(parts) + 1):
                if max_depth is None or depth <= max_depth:
                    table.setdefault(".".join(parts[:depth]), [0, 0])[column] += count
        return {name: (row[0], row[1]) for name, row in table.items()}


@contextmanager
def reference_operators() -> Iterator[None]:
    """Let layer attention run its plain PyTorch operators, so that no fused one hides its work."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


def measure(model: nn.Module, shape: tuple[int, int], *, device: str = "meta") -> Complexity:
    """Count parameters and multiply-adds of a model for one image.

    Args:
        model: detector, classifier or backbone. It is moved to the device, and on "meta" it loses its weights.
        shape: (height, width) of the image.
        device: "meta" computes shapes alone; "cpu" is for models whose control flow asks for values.

    Returns:
        Complexity: by module and kind of operator.

    Raises:
        InputError: the shape does not suit the model, or it asks for values that meta tensors do not have.
    """
    if min(shape) < 1:
        raise InputError(f"shape {tuple(shape)}: give a positive height and width")
    model = model.eval().to(device)
    image = torch.zeros(1, 3, *shape, device=device)
    with torch.no_grad(), reference_operators(), OperationCounter(model) as counter:
        try:
            run(model, image)
        except RuntimeError as error:  # NotImplementedError is one
            if device != "meta" or "meta" not in str(error).lower():
                raise
            raise InputError(
                f"{type(model).__name__} asks for the values of tensors ({str(error).splitlines()[0][:160]}): count it "
                "with real ones, device cpu"
            ) from error
    own = {name: sum(p.numel() for p in module.parameters(recurse=False)) for name, module in model.named_modules()}
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = {name: count for name, count in own.items() if count}
    return Complexity(held, trainable, dict(counter.counts), dict(counter.unknown))


def run(model: nn.Module, image: Tensor) -> None:
    """Run a model on an image (1, 3, H, W) as far as it is network: heads included, nothing after them."""
    if isinstance(model, TwoStageDetector):
        run_two_stage(model, image)
    elif isinstance(model, BaseModel):
        size = tuple(image.shape[2:])
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size))
        model(image, [sample] if hasattr(model, "bbox_head") else None, mode="tensor")
    else:
        model(image)


def run_two_stage(model: TwoStageDetector, image: Tensor) -> None:
    """Run a two-stage detector on as many proposals as it allows, since real ones depend on weights and picture."""
    features = model.extract_feat(image)
    if model.with_rpn:
        model.rpn_head(features)
    limit = (model.test_cfg.get("rpn") or {}).get("max_per_img", 1000)
    proposals = InstanceData(bboxes=image.new_zeros(limit, 4))
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, SingleRoIExtractor):
                stack.enter_context(overridden(module, pooled_shape(module)))
        model.roi_head(features, [proposals])


def pooled_shape(extractor: SingleRoIExtractor):
    """Return a forward that gives what a region extractor gives, without looking at the regions."""
    size = extractor.roi_layers[0].output_size
    size = (size, size) if isinstance(size, int) else tuple(size)

    def forward(features, rois, roi_scale_factor=None):
        return features[0].new_zeros(len(rois), extractor.out_channels, *size)

    return forward


def module_rows(found: Complexity, *, max_depth: int | None = 2) -> list[dict]:
    """Table of a model's modules, and of what kinds of operators they run, for `as_markdown`."""
    return [
        {"module": name or "total", "parameters": f"{parameters:,}", "multiply-adds [G]": giga(operations)}
        for name, (parameters, operations) in found.by_module(max_depth).items()
    ]


def comparison_rows(found: Complexity, other: Complexity, *, max_depth: int | None = 2) -> list[dict]:
    """Table of the modules in which two models differ, the second minus the first."""
    first, second = found.by_module(max_depth), other.by_module(max_depth)
    rows = []
    for name in dict.fromkeys([*first, *second]):
        before, after = first.get(name, (0, 0)), second.get(name, (0, 0))
        if before != after or not name:
            rows.append(
                {
                    "module": name or "total",
                    "parameters, difference": f"{after[0] - before[0]:+,}",
                    "multiply-adds [G], difference": giga(after[1] - before[1], sign=True),
                }
            )
    return rows


def kind_rows(found: Complexity, other: Complexity | None = None) -> list[dict]:
    """Table of multiply-adds by kind of operator, the largest first, and how a second model differs."""
    kinds, others = found.by_kind(), other.by_kind() if other else Counter()
    rows = []
    for kind in sorted({*kinds, *others}, key=lambda kind: -kinds[kind]):
        row = {"operators": kind, "multiply-adds [G]": giga(kinds[kind])}
        if other:
            row["difference"] = giga(others[kind] - kinds[kind], sign=True)
        rows.append(row)
    return rows


def giga(count: int, *, sign: bool = False) -> str:
    """Number of multiply-adds in billions, with as many digits as the difference of two models needs."""
    return f"{count / 1e9:{'+' if sign else ''}.4f}"


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least-squares line y = slope x + offset, and the share R^2 of the variance that it explains."""
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    offset = mean_y - slope * mean_x
    rest = math.fsum((y - slope * x - offset) ** 2 for x, y in zip(xs, ys, strict=True))
    whole = math.fsum((y - mean_y) ** 2 for y in ys)
    return slope, offset, 1 - rest / whole if whole else 1.0
