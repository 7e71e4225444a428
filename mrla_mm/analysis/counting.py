"""Multiply-adds of whatever operators run: the counting rule, and the mode that applies it.

The unit is one multiply-add, or one elementwise product, quotient or square. What counts, for each operator:

    convolution, matrix product    every multiply-add, depthwise and grouped convolutions included
    attention over tokens          q k^T, the product with v, and two products a score (scale and softmax)
    batch norm                     1 an element (scale and shift with running statistics)
    layer and group norm           2 an element (square and scale), 3 with weights
    product, quotient, square      1 an element; gates, lambda and weighted sums over layers are such products
    GELU, SiLU, softmax            1 an element, the product or quotient in them
    mean, average pooling          1 a result
    interpolation                  bilinear 4, bicubic 16 a result

Additions, comparisons, exponentials and movements of data are free, and so is all that is done to integers.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FREE_NAMES = """
    abs add amax amin any arange argmax argsort bernoulli bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_min
    clamp_max clone constant_pad_nd copy cos cumsum elu embedding empty empty_like empty_permuted empty_strided eq erf
    exp eye fill flip floor full full_like gather ge gt index index_put index_select isfinite isnan le lift_fresh
    linspace log log_sigmoid_forward logical_and logical_not logical_or lt masked_fill max max_pool2d_with_indices
    maximum min minimum native_dropout ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero ones
    ones_like rand randn reflection_pad2d relu repeat repeat_interleave resize roll round rsqrt rsub scalar_tensor
    scatter select_scatter sigmoid sign sin slice_scatter sort sqrt stack sub sum tanh threshold topk tril triu unbind
    uniform upsample_nearest1d upsample_nearest2d where zero zeros zeros_like _to_copy _unsafe_view
    _local_scalar_dense set_ max_pool2d view_copy contiguous split_with_sizes_copy
"""
FREE = frozenset(FREE_NAMES.split())
PER_RESULT = {
    **dict.fromkeys(("mul", "div", "addcmul", "addcdiv", "square", "pow", "lerp", "reciprocal"), 1),
    **dict.fromkeys(("gelu", "silu", "mish", "leaky_relu", "hardsigmoid", "_softmax", "_safe_softmax"), 1),
    **dict.fromkeys(("mean", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"), 1),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training"), 1),
    **dict.fromkeys(("_native_batch_norm_legit", "_batch_norm_no_update", "batch_norm"), 1),
    "hardswish": 2,
    "upsample_bilinear2d": 4,
    "grid_sampler_2d": 4,
    "upsample_bicubic2d": 16,
}


def convolution(args: tuple, out: Tensor) -> int:
    """Multiply-adds of a convolution; a transposed one uses each weight once per element of its input."""
    return (args[0] if args[6] else out).numel() * math.prod(args[1].shape[1:])


def matrix_product(args: tuple, out: Tensor) -> int:
    """Multiply-adds of a product whose left factor is the first matrix among the arguments that has the inner size."""
    return out.numel() * args[0].shape[-1]


def added_product(args: tuple, out: Tensor) -> int:
    """Multiply-adds of a matrix product that is added to the first argument."""
    return out.numel() * args[1].shape[-1]


def token_attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Multiply-adds of attention over tokens: q (..., L, D), k (..., S, D), v (..., S, E)."""
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1] + 2)


def layer_norm(args: tuple, out: Tensor) -> int:
    """Products of a layer norm: squares, scale, and the weight if there is one."""
    return out.numel() * (3 if args[2] is not None else 2)


def group_norm(args: tuple, out: Tensor) -> int:
    """Products of a group norm: squares, scale, and the weight if there is one."""
    return out.numel() * (3 if args[1] is not None else 2)


def variance(args: tuple, out: Tensor) -> int:
    """Squares of a variance."""
    return args[0].numel()


def deformable_convolution(args: tuple, out: Tensor) -> int:
    """Multiply-adds of a deformable convolution, and four to sample each value it reads."""
    weight = args[1]
    samples = out.numel() // weight.shape[0] * args[0].shape[1] * math.prod(weight.shape[2:])
    return out.numel() * math.prod(weight.shape[1:]) + 4 * samples


SPECIAL: dict[str, Callable] = {
    "convolution": convolution,
    "_convolution": convolution,
    "deform_conv2d": deformable_convolution,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), matrix_product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), added_product),
    **dict.fromkeys(("var", "var_mean", "std", "linalg_vector_norm"), variance),
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
}


def kind_of(name: str, args: tuple) -> str:
    """Name the kind of work an operator does, for a table of a few lines."""
    if name in ("convolution", "_convolution", "deform_conv2d"):
        depthwise = name != "deform_conv2d" and args[8] > 1 and args[1].shape[1] == 1
        return "depthwise convolutions" if depthwise else "convolutions"
    if SPECIAL.get(name) in (matrix_product, added_product):
        return "matrix products"
    if "norm" in name:
        return "norms"
    products = ("mul", "addcmul", "div", "addcdiv", "square", "pow")
    return "elementwise products" if name in products else "activations, pooling, resizing"


class OperationCounter(TorchDispatchMode):
    """Count the multiply-adds of the operators that run inside, by module and kind of operator.

    Attributes:
        counts: multiply-adds by (name of the module that ran the operator, kind of operator).
        unknown: calls of operators that the rule does not name, by operator.

    Example:
        >>> import torch
        >>> from mrla_mm.analysis.counting import OperationCounter
        >>> layer = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        >>> with torch.no_grad(), OperationCounter(layer) as counter:
        ...     _ = layer(torch.rand(1, 8, 10, 10))
        >>> sum(counter.counts.values())
        7200
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unknown: Counter[str] = Counter()
        self._model = model
        self._running = [""]
        self._handles = []
        self._tokens = TokenAttentionCounter(self)
        self._paused = False

    def __enter__(self) -> "OperationCounter":
        """Start counting, and listening to which module runs."""
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter_module(name)))
            self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        self._tokens.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Stop counting and listening."""
        self._tokens.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().__exit__(*error)

    def _enter_module(self, name: str) -> Callable:
        return lambda module, args: self._running.append(name)

    def _leave_module(self, module, args, out) -> None:
        self._running.pop()

    @contextmanager
    def counted_as(self, kind: str, count: int) -> Iterator[None]:
        """Count what runs inside as one operation of the module that runs."""
        self.counts[self._running[-1], kind] += count
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused:
            return out
        name = func._schema.name.split("::")[1]
        name = name if name in FREE else name.rstrip("_")
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor) or not first.is_floating_point() or is_view(func):
            return out
        if name in SPECIAL:
            count = SPECIAL[name](args, first)
        elif name in PER_RESULT:
            count = PER_RESULT[name] * first.numel()
        else:
            scaled = name in ("add", "sub", "rsub") and kwargs.get("alpha", 1) != 1
            count = first.numel() if scaled else 0
            if name not in FREE:
                self.unknown[func._schema.name] += 1
        if count:
            self.counts[self._running[-1], kind_of(name, args)] += count
        return out


class TokenAttentionCounter(TorchFunctionMode):
    """Count attention over tokens as one operation: which operators it becomes depends on device and version."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function, and count it if it is attention."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        tensors = [*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args) :])]
        with self._counter.counted_as("attention over tokens", token_attention(*tensors)):
            return func(*args, **kwargs)


def is_view(func) -> bool:
    """Whether an operator only looks at its argument in another way."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


@contextmanager
def overridden(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Give a module another forward for a while."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
