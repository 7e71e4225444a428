"""Layer attention in plain PyTorch: the equations of the paper, in the paper's order.

    y = GAP(x)                                                  (B, C)
    q = project(y, W_q),  k = project(y, W_k)                   (B, C), f_Q and f_K of Sec. 4
    v = depthwise 3x3 convolution of x                          (B, C, H, W), f_V

    light   o = sigmoid(q . k / sqrt(D)) v + lambda o'          Eq. 8, Algorithm 3
    base    o = sum_{s<=t} softmax_s(q^t . k^s / sqrt(D)) v^s   Eq. 6, Algorithm 1
    MLA     o = f_V^t(sum_{s<=t} softmax_s(q^t . f_K^t(y^s) / sqrt(D)) x^s)             Eq. 4
    linear  o = phi(q) U / (phi(q) Z)                           App. A.3

q and k are cut into G heads of D channels; U = sum phi(k) v, Z = sum phi(k). Of MLA the paper has
the sum over f_V^t(x^s), which is the same: f_V is linear, and a score is the same in a channel.

Source: "Cross-Layer Retrospective Retrieving via Layer Attention", ICLR 2023. Everything pooled is
computed in at least single precision, autocast or not: it is tiny, and its scores decide about
whole feature maps.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor


class Weights(NamedTuple):
    """Parameters of an attention; None stands for what a variant lacks.

    query and key (1, 1, k) or (E, C), without which the gate is 1; value (C, 1, 3, 3), without
    which v = x; history_scale (C,), without which lambda = 1.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    history_scale: Tensor | None = None


class BatchNorm(NamedTuple):
    """What the residual branch does with an attention's output o: y = x + keep norm(o).

    The norm is a batch norm, by default with frozen statistics; weight and bias (C,) may be None,
    mean and variance (C,) take no gradient. keep (B,) is the drop-path factor of each sample, or
    None for 1, and takes none either. With a momentum the norm is in training: it takes the
    statistics of the batch, and by the momentum updates mean and variance.
    """

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    keep: Tensor | None = None
    eps: float = 1e-5
    momentum: float | None = None


@torch.fx.wrap  # which cannot trace promote_types before torch 2.7
def dtype_of_sums(x: Tensor) -> torch.dtype:
    """Precision that elements of x are added up in, at least single."""
    return torch.promote_types(x.dtype, torch.float32)


def global_average(x: Tensor) -> Tensor:
    """Average each channel over its map, GAP of Algorithm 1: (B, C, H, W) -> (B, C)."""
    return x.mean(dim=(2, 3), dtype=dtype_of_sums(x))


def at_least_float32(tensor: Tensor | None) -> Tensor | None:
    """Tensor in at least single precision."""
    is_half = tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Disable autocast on the device of x."""
    if not isinstance(x, Tensor) or x.is_meta:  # a proxy of torch.fx has no device
        return nullcontext()
    return torch.autocast(device_type=x.device.type, enabled=False)


def project(pooled: Tensor, weight: Tensor) -> Tensor:
    """Query or key projection of pooled channels.

    A (1, 1, k) weight slides along the channels (odd k, zero padding); an (E, C) weight is a full
    linear layer.

    Shapes: pooled (B, C), weight (1, 1, k) or (E, C) -> (B, C) or (B, E).
    """
    weight = weight.to(pooled.dtype)
    with without_autocast(pooled):
        if weight.dim() == 2:
            return F.linear(pooled, weight)  # (B, E)
        reach = weight.shape[-1] // 2
        return F.conv1d(pooled.unsqueeze(1), weight, padding=(reach,)).squeeze(1)  # (B, C)


def depthwise_value(x: Tensor, weight: Tensor | None) -> Tensor:
    """Value of a layer, a depthwise 3x3 convolution; without a weight the value is x itself.

    Shapes: x (B, C, H, W), weight (C, 1, 3, 3) -> (B, C, H, W).
    """
    if weight is None:
        return x
    return F.conv2d(x, weight, padding=1, groups=x.shape[1])


def split_heads(pooled: Tensor, heads: int) -> Tensor:
    """Cut consecutive channels into heads: (B, C) -> (B, G, D)."""
    return pooled.unflatten(1, (heads, -1))


def expand_heads(per_head: Tensor, value: Tensor) -> Tensor:
    """Repeat a value per head over the channels of a map, in the map's precision.

    Shapes: per_head (B, G), value (B, C, ...) -> (B, C, 1, 1).
    """
    width = value.shape[1] // per_head.shape[1]
    return per_head.to(value.dtype).repeat_interleave(width, dim=1)[:, :, None, None]


def light_gate(query: Tensor, key: Tensor) -> Tensor:
    """Gate of MRLA-light, sigmoid(q_h . k_h / sqrt(D)): two (B, G, D) -> (B, G)."""
    return torch.sigmoid((query * key).sum(-1) * query.shape[-1] ** -0.5)


def light_attention(
    value: Tensor, gate: Tensor | None, previous: Tensor | None, scale: Tensor | None
) -> Tensor:
    """MRLA-light, o^t = gate v^t + lambda o^{t-1} (Eq. 8, Algorithm 3).

    Shapes: value (B, C, H, W); gate (B, G) or None for 1; previous (B, C, H, W) or None for no
    history; scale (C,) or None for lambda = 1 -> (B, C, H, W).
    """
    out = value if gate is None else expand_heads(gate, value) * value  # (B, C, H, W)
    if previous is None:
        return out
    previous = previous.to(value.dtype)
    if scale is None:
        return out + previous
    return torch.addcmul(out, scale.to(value.dtype)[:, None, None], previous)


def softmax_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Attention of a layer over its stage, softmax_s(q^t_h . k^s_h / sqrt(D)) (Eq. 6).

    Shapes: query (B, G, D), keys (B, T, G, D) -> (B, T, G), summing to 1 over T.
    """
    logits = (query.unsqueeze(1) * keys).sum(-1) * query.shape[-1] ** -0.5  # (B, T, G)
    return logits.softmax(1)


def scores_and_keys(
    query: Tensor, key: Tensor, earlier_keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax scores of a layer, and the keys of all layers so far, of G * D = E channels.

    Shapes: query and key (B, G, D), earlier_keys (B, T - 1, E) or None -> (B, T, G), (B, T, E).
    """
    keys = key.flatten(1).unsqueeze(1)  # (B, 1, E)
    if earlier_keys is not None:
        keys = torch.cat((earlier_keys, keys), 1)
    return softmax_scores(query, keys.unflatten(2, query.shape[1:])), keys


def weighted_sum(scores: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Sum over layers of score times value, reading each value once and concatenating none.

    Backward needs the values and nothing of their size besides: memory is linear in depth. The last
    value gives the layout: earlier ones may be views whose odd strides a batch norm takes wrongly.

    Shapes: scores (B, T, G), T values (B, C, H, W) -> (B, C, H, W).
    """
    *earlier, last = zip(scores.unbind(1), values, strict=True)
    out = expand_heads(*last) * last[1]  # (B, C, H, W)
    for score, value in earlier:
        out = torch.addcmul(out, expand_heads(score, value), value)
    return out


def frozen_bn_affine(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Scale and offset (C,) of a batch norm with frozen statistics, norm(c) = scale c + offset.

    In at least single precision; the norm's weight and bias learn through them.
    """
    mean, bias = at_least_float32(mean), at_least_float32(bias)
    scale = torch.rsqrt(at_least_float32(variance) + eps)
    if weight is not None:
        scale = scale * at_least_float32(weight)
    return scale, -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)


def norm_residual(x: Tensor, out: Tensor, norm: BatchNorm) -> Tensor:
    """Residual branch, y = x + keep norm(o).

    Shapes: x and out (B, C, H, W) -> (B, C, H, W).
    """
    if norm.momentum is not None:
        statistics = norm.mean, norm.variance
        affine = norm.weight, norm.bias
        branch = F.batch_norm(out, *statistics, *affine, True, norm.momentum, norm.eps)
    else:
        scale, offset = frozen_bn_affine(norm.mean, norm.variance, norm.weight, norm.bias, norm.eps)
        branch = scale.to(x.dtype)[:, None, None] * out + offset.to(x.dtype)[:, None, None]
    if norm.keep is not None:
        branch = norm.keep.to(x.dtype)[:, None, None, None] * branch
    return x + branch


def query_and_key(x: Tensor, weights: Weights, heads: int) -> Sequence[Tensor]:
    """Query and key of a map by head: two (B, G, D)."""
    pooled = global_average(x)
    projections = weights.query, weights.key
    return [split_heads(project(pooled, weight), heads) for weight in projections]


def light_layer(c, shortcut, weights, *, heads, has_history, add_relu=False, norm=None) -> Tensor:
    """MRLA-light with what is around it; arguments and shapes are those of `light_fused`."""
    x = (c + shortcut).relu() if add_relu else c
    gate = None
    if weights.query is not None:
        gate = light_gate(*query_and_key(x, weights, heads))
    history = shortcut if has_history else None
    value = depthwise_value(x, weights.value)
    out = light_attention(value, gate, history, weights.history_scale)
    return out if norm is None else norm_residual(x, out, norm)


def base_layer(
    c, shortcut, weights, memory, *, heads, add_relu=False, norm=None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """MRLA-base with what is around it; arguments and shapes are those of `base_fused`."""
    x = (c + shortcut).relu() if add_relu else c
    earlier_keys, *earlier_values = memory or (None,)
    scores, keys = scores_and_keys(*query_and_key(x, weights, heads), earlier_keys)
    values = (*earlier_values, depthwise_value(x, weights.value))
    out = weighted_sum(scores, values)
    return out if norm is None else norm_residual(x, out, norm), (keys, *values)


def mla_layer(
    c, shortcut, weights, memory, *, heads, add_relu=False, norm=None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """MLA with what is around it; arguments and shapes are those of `mla_fused`."""
    x = (c + shortcut).relu() if add_relu else c
    earlier_keys, *earlier_maps = memory or (None,)
    scores, _ = scores_and_keys(*query_and_key(x, weights, heads), earlier_keys)
    maps = (*earlier_maps, x)
    out = depthwise_value(weighted_sum(scores, maps), weights.value)
    return out if norm is None else norm_residual(x, out, norm), (global_average(x), *maps)


def feature_map(pooled: Tensor) -> Tensor:
    """Positive feature map phi = elu + 1 of linear attention, exact for negative input."""
    return torch.where(pooled > 0, pooled + 1, pooled.clamp(max=0).exp())


def linear_state(key: Tensor, value: Tensor) -> Tensor:
    """What one layer adds to the memory of linearised layer attention, phi(k)^T v (App. A.3).

    In the precision of the key, at least single: phi falls to 1e-9 and its sums divide by each
    other.

    Shapes: key (B, G, E), value (B, C, H, W) -> (B, G, E, D, H, W), E times the value's size.
    """
    phi = feature_map(key)  # (B, G, E)
    heads = value.unflatten(1, (phi.shape[1], -1))  # (B, G, D, H, W)
    return phi[..., None, None, None] * heads.unsqueeze(2)


def linear_attention(query: Tensor, state: Tensor, normaliser: Tensor) -> Tensor:
    """Linearised layer attention, phi(q) U / (phi(q) Z), per head (App. A.3).

    Where every key of a head so far is below about -43, phi(q) Z leaves what float32 can divide by
    (float64: -354), and the result fades to 0.

    Shapes: query (B, G, E), state U (B, G, E, D, H, W), normaliser Z (B, G, E) -> (B, C, H, W).
    """
    # A common factor of phi(q) cancels; taken out, the sum is that of Z alone, held where its
    # square is above 0.
    shift = query.amax(-1, keepdim=True).clamp(max=0)  # (B, G, 1)
    phi = torch.where(query > 0, query + 1, (query.clamp(max=0) - shift).exp())  # (B, G, E)
    phi = phi / phi.sum(-1, keepdim=True)
    total = (phi * normaliser).sum(-1, keepdim=True)  # (B, G, 1)
    weights = phi / total.clamp_min(torch.finfo(total.dtype).tiny ** 0.5)
    with without_autocast(state):
        return torch.einsum("bge,bgedhw->bgdhw", weights.to(state.dtype), state).flatten(1, 2)
