"""Layer attention as linear functions of the maps: its coefficients, and gradients from grid sums.

With the scores A of a layer, the drop-path factor k, and a frozen batch norm of scale s and bias t,
the residual branch is

    light   y = x + k (s (A dw(x; W) + lambda p) + t) = x + gain dw(x; W) + slope p + offset
    base    y = x + k (s sum_s A_s v_s + t)           = x + gain sum_s A_s v_s + offset
    MLA     as base, but the values are the maps x_s, and dw comes after the sum

    factor = k s,  slope = factor lambda,  offset = k t          per sample and channel
    gain = factor A for light, factor for base and MLA

where dw is the depthwise convolution and p the history. Backward needs sums over the grid alone: of
grad times each shifted x, or times each value, of grad times p, and of grad. With these, of light

    d gain = sum grad dw(x) = sum_i W_i sum grad x_i    x_i: x shifted to tap i of the kernel
    d W_i = sum_B gain sum grad x_i
    d A = factor d gain,  d slope = sum grad p,  d lambda = sum_B factor d slope
    d factor = A d gain + lambda d slope,  d offset = sum grad

Everything here is small and at least in single precision. `passes` has the shapes of averages and
sums over the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.reference import (
    BatchNorm,
    Weights,
    at_least_float32,
    frozen_bn_affine,
    light_gate,
    scores_and_keys,
    split_heads,
)


class Parameters(NamedTuple):
    """Weights and norm of a layer, or their gradients, as an autograd Function takes them: flat."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    history_scale: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def pack(cls, weights: Weights, norm: BatchNorm | None) -> "Parameters":
        """All tensors of both, but for the statistics of a norm in training."""
        if norm is None:
            return cls(*weights)
        is_frozen = norm.momentum is None
        statistics = (norm.mean, norm.variance) if is_frozen else (None, None)
        return cls(*weights, norm.weight, norm.bias, *statistics, norm.keep)

    def weights(self) -> Weights:
        """The weights of the attention."""
        return Weights._make(self[: len(Weights._fields)])

    def frozen_norm(self, eps: float) -> BatchNorm | None:
        """The norm, if its statistics are frozen."""
        if self.mean is None:
            return None
        return BatchNorm(self.norm_weight, self.norm_bias, self.mean, self.variance, self.keep, eps)


class Layer(NamedTuple):
    """What a layer computes with.

    frozen_norm follows it within the passes; with has_history, lambda p is part of it; with
    add_relu, x is relu(c + shortcut), and gradients go on through that ReLU.
    """

    weights: Weights
    frozen_norm: BatchNorm | None
    heads: int
    has_history: bool = False
    add_relu: bool = False
    is_mla: bool = False

    @property
    def fuses_norm(self) -> bool:
        """Whether the passes apply norm and residual; those of a norm in training come after."""
        return self.frozen_norm is not None


class Saved(NamedTuple):
    """Small tensors that a layer's forward pass leaves for its backward pass, at least float32.

    The first four are None for a layer without a gate. The others are what maps are multiplied by
    or what is added to every pixel; None stands for a gain or slope of 1, an offset of 0.
    """

    pooled: Tensor | None = None  # average of x over the grid (B, C)
    query: Tensor | None = None  # (B, C)
    keys: Tensor | None = None  # of the stage's layers so far (B, T, C), of light its own
    scores: Tensor | None = None  # (B, T, G)
    gain: Tensor | None = None  # of the value or values (B, C)
    slope: Tensor | None = None  # of the history (B, C)
    offset: Tensor | None = None  # (B, C)


@dataclass
class PixelGrad:
    """What the gate adds to the gradient of every pixel of x (B, C), None for nothing.

    A subclass may leave a part of it, and gradients of parameters, to `convolve_backward`.
    """

    known: Tensor | None = None  # all of it, or a part that a subclass adds to

    def finish(self) -> Tensor | None:
        """Do what is left to do, and return the whole."""
        return self.known


def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Product of two factors, of which None stands for 1."""
    if a is None or b is None:
        return b if a is None else a
    return a * b


def norm_coefficients(
    norm: BatchNorm | None, size: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Factor keep s and offset keep t of a norm (B, C), at least float32; None each without one."""
    if norm is None:
        return None, None
    scale, bias = frozen_bn_affine(norm.mean, norm.variance, norm.weight, norm.bias, norm.eps)
    keep = None if norm.keep is None else norm.keep.unsqueeze(1)
    return product(scale, keep).expand(size), product(bias, keep).expand(size)


def expand_scores(scores: Tensor, channels: int) -> Tensor:
    """Repeat scores over the channels of their heads: (B, T, G) -> (B, T, C)."""
    return scores.unsqueeze(-1).expand(-1, -1, -1, channels // scores.shape[2]).flatten(2)


def value_weights(scores: Tensor, gain: Tensor | None, channels: int) -> Tensor:
    """Weight of each value, gain times score: (B, T, G) and (B, C) -> (B, T, C)."""
    weights = expand_scores(scores, channels)
    return weights if gain is None else weights * gain.unsqueeze(1)


def sum_heads(per_channel: Tensor, heads: int) -> Tensor:
    """Sum over the channels of each head: (B, T, C) -> (B, T, G)."""
    return per_channel.unflatten(2, (heads, -1)).sum(-1)


def windows(per_channel: Tensor, kernel_size: int) -> Tensor:
    """Channels under each tap of a zero-padded convolution: (..., C) -> (..., kernel_size, C)."""
    padded = F.pad(per_channel, (kernel_size // 2, kernel_size // 2))
    return padded.unfold(-1, kernel_size, 1).mT


def project_both(pooled: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Query and key (B, C) of averages (B, C): as products, faster on a CPU than a convolution."""
    both = torch.cat((weights.query, weights.key)).squeeze(1).to(pooled.dtype)  # (2, k)
    return (both @ windows(pooled, both.shape[1])).unbind(1)


def project_both_transposed(grads: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
    """Gradients of the averages (B, C), given those of query and key (B, 2, C)."""
    both = torch.cat((query_weight, key_weight)).to(grads.dtype)  # (2, 1, k)
    return (both.flip(2) @ windows(grads, both.shape[2])).sum((1, 2))


def light_coefficients(averages: Tensor | None, layer: Layer, size: torch.Size) -> Saved:
    """Coefficients of MRLA-light for averages, None without a gate; size is that of x."""
    factor, offset = norm_coefficients(layer.frozen_norm, size[:2])
    slope = None
    if layer.has_history:
        slope = product(at_least_float32(layer.weights.history_scale), factor)
    if slope is not None:
        slope = slope.expand(size[:2])
    if averages is None:
        return Saved(gain=factor, slope=slope, offset=offset)
    pooled = averages.sum(0)  # (B, C)
    query, key = project_both(pooled, layer.weights)
    heads = layer.heads
    scores = light_gate(split_heads(query, heads), split_heads(key, heads)).unsqueeze(1)
    gain = value_weights(scores, factor, size[1]).squeeze(1)
    return Saved(pooled, query, key.unsqueeze(1), scores, gain, slope, offset)


def base_coefficients(averages: Tensor, layer: Layer, earlier_keys: Tensor | None) -> Saved:
    """Coefficients of MRLA-base and MLA for averages and earlier keys (B, T - 1, C)."""
    pooled = averages.sum(0)  # (B, C)
    heads = layer.heads
    factor, offset = norm_coefficients(layer.frozen_norm, pooled.shape)
    query, key = project_both(pooled, layer.weights)
    scores, keys = scores_and_keys(split_heads(query, heads), split_heads(key, heads), earlier_keys)
    return Saved(pooled, query, keys, scores, gain=factor, offset=offset)


def split_grid_sums(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of a gradient times x at n taps (B, n, C), times the history, and of it (B, C) each."""
    total = sums.sum(0)
    return total[:, :-2], total[:, -2], total[:, -1]


def light_coefficients_backward(
    saved: Saved, layer: Layer, size: torch.Size, sums: Tensor
) -> tuple[PixelGrad, Parameters]:
    """Gradients of MRLA-light that follow from the grid sums of its output's gradient.

    Returns those of every pixel of x, and of the parameters, summed over the samples.
    """
    weights, scores, gain = layer.weights, saved.scores, saved.gain
    factor, _ = norm_coefficients(layer.frozen_norm, size[:2])
    of_taps, of_history, of_grad = split_grid_sums(sums)
    grad_pixel = grad_query = grad_key = grad_value = grad_history_scale = None
    grad_gain = of_taps[:, 0]  # (B, C), where there is no convolution and dw(x) is x
    if weights.value is not None:
        grad_gain = (of_taps * at_least_float32(weights.value).flatten(1).mT).sum(1)
        grad_kernels = of_taps if gain is None else of_taps * gain.unsqueeze(1)
        grad_value = grad_kernels.sum(0).mT.reshape(weights.value.shape)
    grad_factor = grad_gain
    if scores is not None:
        grad_factor = grad_gain * expand_scores(scores, size[1]).squeeze(1)
        grad_gate = sum_heads(product(grad_gain, factor).unsqueeze(1), layer.heads)
        grad_logits = torch.ops.aten.sigmoid_backward(grad_gate, scores)
        grad_pixel, grad_query, grad_key, _ = logits_backward(saved, weights, size, grad_logits)
    if layer.has_history:
        history_scale = at_least_float32(weights.history_scale)
        grad_factor = grad_factor + product(of_history, history_scale)
        if history_scale is not None:
            grad_history_scale = product(of_history, factor).sum(0)
    return PixelGrad(grad_pixel), Parameters(
        query=grad_query,
        key=grad_key,
        value=grad_value,
        history_scale=grad_history_scale,
        **norm_backward(layer.frozen_norm, grad_factor, of_grad),
    )


def base_coefficients_backward(
    saved: Saved,
    layer: Layer,
    size: torch.Size,
    sums: Tensor,
    value_sums: Tensor,
    *,
    grad_keys: Tensor | None = None,
    grad_pooled: Tensor | None = None,
) -> tuple[PixelGrad, Parameters, Tensor | None]:
    """Gradients of MRLA-base and MLA that follow from sums over the grid.

    `sums` are the grid sums of the gradient of the convolution's output, `value_sums` the value
    sums of that of the weighted sum; `grad_keys` (B, T, C) comes from later layers of base,
    `grad_pooled` (B, C) from those of MLA.

    Returns also those of earlier keys (B, T - 1, C), or None.
    """
    scores = saved.scores
    of_taps, _, of_grad = split_grid_sums(sums)
    of_values = value_sums.sum(0)
    grad_weights = of_values[:, :-1]  # (B, T, C), of gain times score
    grad_gain = (grad_weights * expand_scores(scores, size[1])).sum(1)
    grad_offset = of_grad if layer.is_mla else of_values[:, -1]
    if saved.gain is not None:
        grad_weights = grad_weights * saved.gain.unsqueeze(1)
    grad_scores = sum_heads(grad_weights, layer.heads)
    grad_logits = scores * (grad_scores - (scores * grad_scores).sum(1, keepdim=True))
    grad_pixel, grad_query, grad_key, grad_earlier_keys = logits_backward(
        saved, layer.weights, size, grad_logits, grad_keys
    )
    if grad_pooled is not None:
        grad_pixel = grad_pixel + grad_pooled / (size[2] * size[3])
    gradients = Parameters(
        query=grad_query,
        key=grad_key,
        value=of_taps.sum(0).mT.reshape(layer.weights.value.shape),
        **norm_backward(layer.frozen_norm, grad_gain, grad_offset),
    )
    return PixelGrad(grad_pixel), gradients, grad_earlier_keys


def logits_backward(
    saved: Saved,
    weights: Weights,
    size: torch.Size,
    grad_logits: Tensor,
    grad_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Backward of the logits q . k / sqrt(D), which the sigmoid or softmax takes.

    Shapes: grad_logits (B, T, G), grad_keys from later layers (B, T, C) or None -> gradient of
    every pixel of x through its average (B, C), of the weights of query and key, and of the earlier
    keys (B, T - 1, C) or None.
    """
    _, channels, height, width = size
    head_channels = channels // grad_logits.shape[2]
    grad_products = expand_scores(grad_logits * head_channels**-0.5, channels)  # (B, T, C)
    grad_query = (grad_products * saved.keys).sum(1)
    grad_all_keys = grad_products * saved.query.unsqueeze(1)
    if grad_keys is not None:
        grad_all_keys = grad_all_keys + grad_keys
    grads = torch.stack((grad_query, grad_all_keys[:, -1]), 1)  # (B, 2, C)
    grad_pixel = project_both_transposed(grads, weights.query, weights.key) / (height * width)
    kernel_size = weights.query.shape[-1]
    grad_both = (grads @ windows(saved.pooled, kernel_size).mT).sum(0)  # (2, k)
    grad_query_weight, grad_key_weight = grad_both.view(2, 1, 1, kernel_size)
    grad_earlier = grad_all_keys[:, :-1] if grad_all_keys.shape[1] > 1 else None
    return grad_pixel, grad_query_weight, grad_key_weight, grad_earlier


def norm_backward(
    norm: BatchNorm | None, grad_factor: Tensor, grad_offset: Tensor
) -> dict[str, Tensor | None]:
    """Gradients (C,) of a norm's parameters by name, given those of factor and offset (B, C)."""
    if norm is None:
        return {}
    keep = None if norm.keep is None else norm.keep.unsqueeze(1)
    grad_scale = product(grad_factor, keep).sum(0)
    grad_bias = product(grad_offset, keep).sum(0)
    root = torch.rsqrt(at_least_float32(norm.variance) + norm.eps)
    grad_weight = root * (grad_scale - norm.mean * grad_bias)
    return dict(
        norm_weight=None if norm.weight is None else grad_weight,
        norm_bias=None if norm.bias is None else grad_bias,
    )
