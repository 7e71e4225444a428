"""Parameters and multiply-adds of detectors, classifiers and backbones, from their configs alone.

The unit is one multiply-add, for one image and a model in eval mode. Every multiply-add and every
elementwise product, quotient or square counts, as `RULE` has it; additions, comparisons,
exponentials and data movement are free. Attention over tokens is q k^T, the product with v, and two
products a score. Two-stage detectors get as many proposals as their test_cfg allows (1000), their
masks 100, and pooling the regions is free. mmengine's counter leaves out elementwise products and
scaled_dot_product_attention, much of what layer attention costs.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FREE = """
    abs add amax amin any arange argmax argsort bernoulli bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_max
    clamp_min clone constant_pad_nd contiguous copy cos cumsum elu embedding empty empty_like empty_permuted
    empty_strided eq erf exp eye fill flip floor full full_like gather ge gt index index_put index_select isfinite
    isnan le lift_fresh linspace log log_sigmoid_forward logical_and logical_not logical_or lt masked_fill max
    max_pool2d max_pool2d_with_indices maximum min minimum native_dropout ne neg new_empty new_empty_strided new_full
    new_ones new_zeros nonzero ones ones_like rand randn reflection_pad2d relu repeat repeat_interleave resize roll
    round rsqrt rsub scalar_tensor scatter select_scatter set sigmoid sign sin slice_scatter sort
    split_with_sizes_copy sqrt stack sub sum tanh threshold topk tril triu unbind uniform upsample_nearest1d
    upsample_nearest2d view_copy where zero zeros zeros_like _local_scalar_dense _to_copy _unsafe_view
"""


def convolution(args: tuple, out: Tensor) -> int:
    """Multiply-adds of a convolution; a transposed one uses each weight once per element of its input."""
    return (args[0] if args[6] else out).numel() * math.prod(args[1].shape[1:])


OTHER = "activations, pooling, resizing"
RULE = {  # operators, kind of work, multiply-adds from the arguments and the first result
    "convolution _convolution": ("convolutions", convolution),
    "mm bmm mv dot": ("matrix products", lambda args, out: out.numel() * args[0].shape[-1]),
    "addmm baddbmm addmv": ("matrix products", lambda args, out: out.numel() * args[1].shape[-1]),
    "mul div addcmul addcdiv square pow lerp reciprocal": (
        "elementwise products",
        lambda args, out: out.numel(),
    ),
    "native_batch_norm cudnn_batch_norm batch_norm _batch_norm_no_update _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training": ("norms", lambda args, out: out.numel()),
    "native_layer_norm": ("norms", lambda args, out: out.numel() * (2 if args[2] is None else 3)),
    "native_group_norm": ("norms", lambda args, out: out.numel() * (2 if args[1] is None else 3)),
    "var var_mean std linalg_vector_norm": ("norms", lambda args, out: args[0].numel()),
    "gelu silu mish leaky_relu hardsigmoid _softmax _safe_softmax mean avg_pool2d adaptive_avg_pool2d "
    "_adaptive_avg_pool2d": (OTHER, lambda args, out: out.numel()),
    "hardswish": (OTHER, lambda args, out: 2 * out.numel()),
    "upsample_bilinear2d grid_sampler_2d": (OTHER, lambda args, out: 4 * out.numel()),
    "upsample_bicubic2d": (OTHER, lambda args, out: 16 * out.numel()),
}
COUNTED = {name: rule for names, rule in RULE.items() for name in names.split()}
NOT_COUNTED = frozenset(FREE.split())


class OperationCounter(TorchDispatchMode):
    """Count the multiply-adds of the operators that run inside; layer attention runs unfused under its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = (
            Counter()
        )  # as `Complexity.operations`, and `unknown` as there
        self.unknown: Counter[str] = Counter()
        self.module = [""]
        self.paused = False
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> "OperationCounter":
        """Start counting."""
        for name, module in self._model.named_modules():
            enter = module.register_forward_pre_hook(
                lambda module, args, name=name: self.module.append(name)
            )
            leave = module.register_forward_hook(
                lambda module, args, out: self.module.pop() and None, always_call=True
            )
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        self._stack.enter_context(TokenAttentionCounter(self))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        is_view = alias is not None and not alias.is_write
        if self.paused or is_view or not isinstance(first, Tensor) or not first.is_floating_point():
            return out
        name = func._schema.name.split("::")[1]
        name = name if name in COUNTED or name in NOT_COUNTED else name.rstrip("_")
        kind, count = COUNTED.get(name, ("elementwise products", lambda args, out: 0))
        if name.endswith("convolution") and args[8] > 1 and args[1].shape[1] == 1:
            kind = "depthwise convolutions"
        if name in ("add", "sub", "rsub") and kwargs.get("alpha", 1) != 1:
            count = lambda args, out: out.numel()  # noqa: E731
        elif name not in COUNTED and name not in NOT_COUNTED:
            self.unknown[func._schema.name] += 1
        self.counts[self.module[-1], kind] += count(args, first)
        return out


class TokenAttentionCounter(TorchFunctionMode):
    """Count attention over tokens as one operation: which operators it becomes depends on device and version."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function, and count it if it is attention: q (..., L, D), k (..., S, D), v (..., S, E)."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = [
            *args[:3],
            *(kwargs[name] for name in ("query", "key", "value")[len(args) :]),
        ]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        count = scores * (query.shape[-1] + value.shape[-1] + 2)
        self.counter.counts[self.counter.module[-1], "attention over tokens"] += count
        self.counter.paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.counter.paused = False


class Complexity(NamedTuple):
    """What a model has and does."""

    parameters: Mapping[str, int]  # by name of the module that holds them, each once
    trainable: int  # how many of them are not frozen
    operations: Mapping[
        tuple[str, str], int
    ]  # multiply-adds by (name of the module that runs them, kind of operator)
    unknown: Mapping[str, int]  # calls of operators that the rule does not name

    @property
    def total(self) -> int:
        """All multiply-adds."""
        return sum(self.operations.values())

    def by_kind(self) -> Counter[str]:
        """Multiply-adds by kind of operator."""
        return sum(
            (Counter({kind: count}) for (_, kind), count in self.operations.items()), Counter()
        )

    def by_module(self, max_depth: int | None = None) -> dict[str, tuple[int, int]]:
        """Parameters and multiply-adds of each module with its submodules, down to a depth; "" is the whole model."""
        table = {"": (0, 0)}
        entries = [(name, (count, 0)) for name, count in self.parameters.items()]
        entries += [(name, (0, count)) for (name, _), count in self.operations.items()]
        for name, (parameters, operations) in entries:
            parts = name.split(".") if name else []
            for depth in range(len(parts[:max_depth]) + 1):
                key = ".".join(parts[:depth])
                before = table.get(key, (0, 0))
                table[key] = before[0] + parameters, before[1] + operations
        return table


def measure(model: nn.Module, shape: tuple[int, int], *, device: str = "meta") -> Complexity:
    """Count parameters and multiply-adds of a model for one image.

    Args:
        model: detector, classifier or backbone. It is moved to the device, and on "meta" it loses
            its weights.
        shape: (height, width) of the image.
        device: "meta" computes shapes alone; "cpu" is for models whose control flow needs values.
    """
    model = model.eval().to(device)
    with torch.no_grad(), OperationCounter(model) as counter:
        run(model, torch.zeros(1, 3, *shape, device=device))
    held = {
        name: sum(p.numel() for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Complexity(
        {k: v for k, v in held.items() if v},
        trainable,
        dict(+counter.counts),
        dict(counter.unknown),
    )


def run(model: nn.Module, image: Tensor) -> None:
    """Run a model on an image (1, 3, H, W), heads included, without post-processing."""
    if isinstance(model, TwoStageDetector):
        run_two_stage(model, image)
    elif isinstance(model, BaseModel):
        size = tuple(image.shape[2:])
        sample = DetDataSample(
            metainfo=dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size)
        )
        model(image, [sample] if hasattr(model, "bbox_head") else None, mode="tensor")
    else:
        model(image)


def run_two_stage(model: TwoStageDetector, image: Tensor) -> None:
    """Run a two-stage detector on as many proposals as it allows, since real ones depend on weights and image."""
    features = model.extract_feat(image)
    if model.with_rpn:
        model.rpn_head(features)
    limit = (model.test_cfg.get("rpn") or {}).get("max_per_img", 1000)
    extractors = [module for module in model.modules() if isinstance(module, SingleRoIExtractor)]
    for module in extractors:  # regions have a shape without being pooled
        shape = module.out_channels, *_pair(module.roi_layers[0].output_size)
        module.forward = lambda features, rois, *args, shape=shape: features[0].new_zeros(
            len(rois), *shape
        )
    try:
        model.roi_head(features, [InstanceData(bboxes=image.new_zeros(limit, 4))])
    finally:
        for module in extractors:
            del module.forward
