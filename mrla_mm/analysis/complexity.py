"""Parameters and multiply-adds of detectors, classifiers and backbones, from their configs alone.

The unit is one multiply-add, for one image and a model in eval mode; `RULE` says what counts, and
additions, comparisons, exponentials and data movement are free. Attention over tokens is q k^T, the
product with v, and two products a score. Two-stage detectors get as many proposals as their
test_cfg allows (1000), their masks 100, and pooling the regions is free.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Call = Mapping[str, object]  # an operator's arguments by torch's names for them


def convolution(call: Call, out: Tensor) -> int:
    """Count a convolution; a transposed one uses each weight once for each input element."""
    pixels = call["input"] if call["transposed"] else out
    return pixels.numel() * math.prod(call["weight"].shape[1:])


def matrix_product(call: Call, out: Tensor) -> int:
    """Count a product, whose first factor has one of these names."""
    first = next(call[name] for name in ("mat1", "batch1", "mat", "self") if name in call)
    return out.numel() * first.shape[-1]


def affine_norm(call: Call, out: Tensor) -> int:
    """Count a norm, which may have no weight."""
    return out.numel() * (2 if call["weight"] is None else 3)


OTHER = "activations, pooling, resizing"
# Kind of work, operators, multiply-adds: a number for each element of the first result, or a
# function of the arguments and that result.
RULE = (
    ("convolutions", "convolution _convolution", convolution),
    ("matrix products", "mm bmm mv dot addmm baddbmm addmv", matrix_product),
    ("elementwise products", "mul div addcmul addcdiv square pow lerp reciprocal", 1),
    ("norms", "batch_norm native_batch_norm cudnn_batch_norm _batch_norm_no_update", 1),
    ("norms", "_native_batch_norm_legit _native_batch_norm_legit_no_training", 1),
    ("norms", "native_layer_norm native_group_norm", affine_norm),
    ("norms", "var var_mean std linalg_vector_norm", lambda call, out: call["self"].numel()),
    (OTHER, "gelu silu mish leaky_relu hardsigmoid _softmax _safe_softmax mean", 1),
    (OTHER, "avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d", 1),
    (OTHER, "hardswish", 2),
    (OTHER, "upsample_bilinear2d grid_sampler_2d", 4),
    (OTHER, "upsample_bicubic2d", 16),
)
COUNTED = {name: (kind, rule) for kind, names, rule in RULE for name in names.split()}


class OperationCounter(TorchDispatchMode):
    """Count the multiply-adds of what runs inside.

    Its hooks let layer attention run module by module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()  # by module and kind
        self.unknown: Counter[str] = Counter()
        self.inside = [""]  # names of the modules that run, the innermost last
        self.paused = False
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> "OperationCounter":
        for name, module in self._model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name))
            leave = module.register_forward_hook(self._leave_module, always_call=True)
            self._stack.enter_context(enter)
            self._stack.enter_context(leave)
        self._stack.enter_context(TokenAttentionCounter(self))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _leave_module(self, module, args, out):
        self.inside.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        has_floats = isinstance(first, Tensor) and first.is_floating_point()
        if has_floats and not self.paused and not func.is_view:
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._schema.name, dict(zip(names, args, strict=False)) | kwargs, first)
        return out

    def _count(self, operator: str, call: Call, out: Tensor) -> None:
        """Count a call by the rule, or note that its operator is not one of torch's."""
        name = name_in_rule(operator, call)
        if name in COUNTED:
            kind, rule = COUNTED[name]
            if rule is convolution and call["groups"] > 1 and call["weight"].shape[1] == 1:
                kind = "depthwise convolutions"
            count = rule(call, out) if callable(rule) else rule * out.numel()
            self.counts[self.inside[-1], kind] += count
        elif not operator.startswith("aten::"):
            self.unknown[operator] += 1


def name_in_rule(operator: str, call: Call) -> str:
    """Return the operator's name in the rule, mul for aten::mul_; a + 2 b is a product."""
    name = operator.split("::")[1].rstrip("_")
    return "mul" if name in ("add", "sub", "rsub") and call.get("alpha", 1) != 1 else name


class TokenAttentionCounter(TorchFunctionMode):
    """Count attention over tokens as one operation, whatever operators the device makes of it."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        place = self.counter.inside[-1], "attention over tokens"
        self.counter.counts[place] += token_attention(*args, **kwargs)
        self.counter.paused = True
        out = func(*args, **kwargs)
        self.counter.paused = False
        return out


def token_attention(query: Tensor, key: Tensor, value: Tensor, *_, **options: object) -> int:
    """Count the two products of attention over tokens, and two products a score."""
    scores = query.numel() // query.shape[-1] * key.shape[-2]  # (..., L, S)
    return scores * (query.shape[-1] + value.shape[-1] + 2)


class Complexity(NamedTuple):
    """Parameters and multiply-adds of a model."""

    parameters: Mapping[str, int]  # by name of the module that holds them
    trainable: int  # parameters that are not frozen
    operations: Mapping[tuple[str, str], int]  # multiply-adds by name of the module and kind
    unknown: Mapping[str, int]  # calls of operators that are not torch's

    @property
    def total(self) -> int:
        """All multiply-adds."""
        return sum(self.operations.values())

    def by_kind(self) -> Counter[str]:
        """Multiply-adds by kind of operator."""
        kinds = Counter()
        for (_, kind), count in self.operations.items():
            kinds[kind] += count
        return kinds

    def by_module(self, max_depth: int | None = None) -> dict[str, tuple[int, int]]:
        """Parameters and multiply-adds of modules with their submodules; "" is the whole model."""
        entries = [(name, count, 0) for name, count in self.parameters.items()]
        entries += [(name, 0, count) for (name, _), count in self.operations.items()]
        table = {"": (0, 0)}
        for name, parameters, operations in entries:
            parts = name.split(".")[:max_depth] if name else []
            for depth in range(len(parts) + 1):
                key = ".".join(parts[:depth])
                before = table.get(key, (0, 0))
                table[key] = before[0] + parameters, before[1] + operations
        return table


def measure(model: nn.Module, shape: tuple[int, int], *, device: str = "meta") -> Complexity:
    """Count parameters and multiply-adds of a model for one image of a shape (height, width).

    The model is for nothing else from then on: it is moved to the device, and its regions pool
    nothing. On "meta" only shapes are computed; "cpu" is for control flow that needs values.
    """
    model = model.eval().to(device)
    with torch.no_grad(), OperationCounter(model) as counter:
        run(model, torch.zeros(1, 3, *shape, device=device))
    parameters = Counter()
    for name, parameter in model.named_parameters():
        parameters[name.rpartition(".")[0]] += parameter.numel()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Complexity(parameters, trainable, +counter.counts, counter.unknown)


def run(model: nn.Module, image: Tensor) -> None:
    """Run a model on an image (1, 3, H, W), heads included, without post-processing."""
    if isinstance(model, TwoStageDetector):
        run_two_stage(model, image)
    elif isinstance(model, BaseModel):
        size = tuple(image.shape[2:])
        shapes = dict.fromkeys(("img_shape", "ori_shape", "batch_input_shape", "pad_shape"), size)
        samples = [DetDataSample(metainfo=shapes)] if hasattr(model, "bbox_head") else None
        model(image, samples, mode="tensor")
    else:
        model(image)


def run_two_stage(model: TwoStageDetector, image: Tensor) -> None:
    """Run a two-stage detector on its maximum number of proposals, for any weights and image."""
    features = model.extract_feat(image)
    if model.with_rpn:
        model.rpn_head(features)
    limit = (model.test_cfg.get("rpn") or {}).get("max_per_img", 1000)
    for module in model.modules():
        if isinstance(module, SingleRoIExtractor):
            module.forward = partial(empty_roi_features, module)
    model.roi_head(features, [InstanceData(bboxes=image.new_zeros(limit, 4))])


def empty_roi_features(extractor: SingleRoIExtractor, features, rois: Tensor, *_) -> Tensor:
    """Return what a RoI extractor would, without values: regions have a shape, pooling is free."""
    size = extractor.roi_layers[0].output_size
    return features[0].new_zeros(len(rois), extractor.out_channels, *size)
