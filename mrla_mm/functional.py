"""Layer attention in plain PyTorch: the equations of the paper, in the paper's order.

    y = GAP(x)                                                  (B, C)
    q = f_Q(y),  k = f_K(y)                                     (B, G, D), Sec. 4
    v = f_V(x), a depthwise 3x3 convolution                     (B, C, H, W)

    light   o = sigmoid(q . k / sqrt(D)) v + lambda p           Eq. 8, Algorithm 3
    base    o = sum_{s<=t} softmax_s(q^t . k^s / sqrt(D)) v^s   Eq. 6, Algorithm 1
    MLA     o = f_V^t(sum_{s<=t} softmax_s(q^t . f_K^t(y^s) / sqrt(D)) x^s)             Eq. 4
    linear  o = phi(q) U / (phi(q) Z)                           App. A.3

q and k have G heads of D channels; the history p of light is o^{t-1} or the block's shortcut; U =
sum phi(k) v, Z = sum phi(k). The paper's MLA sums f_V^t(x^s): f_V is linear and depthwise and a
score is constant over a channel, so f_V may follow the sum.

The last part has cheaper forms of the same equations. One vocabulary throughout the package: B
batch, C channels, H W grid, G heads, D head channels (C = G * D), T depth in the stage.

Source: "Cross-Layer Retrospective Retrieving via Layer Attention", ICLR 2023. Pooling and
scores are in at least single precision: they are tiny and decide about whole feature maps.
Projections run in the precision of their weights, autocast or not.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.torch_support import is_autocast_enabled, is_compiling


@torch.fx.wrap  # which cannot trace promote_types before torch 2.7
def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Precision that elements of x are added up in, at least single."""
    return torch.promote_types(x.dtype, torch.float32)


def global_average(x: Tensor) -> Tensor:
    """Average each channel over its map, GAP of Algorithm 1: (B, C, H, W) -> (B, C).

    A sum, since in float32 its gradient is a view, and that of a mean a map.
    """
    return x.sum(dim=(2, 3), dtype=accumulation_dtype(x)) / (x.shape[2] * x.shape[3])


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Disable autocast on the device of x."""
    if not isinstance(x, Tensor) or x.is_meta:  # a proxy of torch.fx has no device
        return nullcontext()
    return torch.autocast(device_type=x.device.type, enabled=False)


def depthwise_value(x: Tensor, weight: Tensor) -> Tensor:
    """Value of a layer, f_V: (B, C, H, W) and weight (C, 1, 3, 3) -> (B, C, H, W)."""
    return F.conv2d(x, weight, padding=1, groups=x.shape[1])


def split_heads(pooled: Tensor, heads: int) -> Tensor:
    """Cut consecutive channels into heads: (B, C) -> (B, G, D)."""
    return pooled.unflatten(1, (heads, -1))


def expand_heads(per_head: Tensor, channels: int) -> Tensor:
    """Repeat a value per head for each of its channels: (B, ..., G) -> (B, ..., C)."""
    return per_head.repeat_interleave(channels // per_head.shape[-1], dim=-1)


def on_map(per_channel: Tensor, x: Tensor) -> Tensor:
    """View values per channel as a map of one pixel, in the precision of a map x.

    Shapes: (C,) or (B, C) -> (C, 1, 1) or (B, C, 1, 1).
    """
    return per_channel.to(x.dtype)[..., None, None]


def scale_map(value: Tensor, gain: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return gain v + offset, of a map (B, C, H, W) and values per channel, (C,) or (B, C)."""
    if offset is None:
        return on_map(gain, value) * value
    return torch.addcmul(on_map(offset, value), on_map(gain, value), value)


def light_gate(query: Tensor, key: Tensor) -> Tensor:
    """Gate of MRLA-light, sigmoid(q_h . k_h / sqrt(D)): two (B, G, D) -> (B, G)."""
    return torch.sigmoid((query * key).sum(-1) * query.shape[-1] ** -0.5)


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


@torch.fx.wrap  # it loops over layers
def weighted_sum(weights: Tensor, values: Sequence[Tensor], offset: Tensor | None = None) -> Tensor:
    """Sum over layers of weight times value, and of an offset if there is one.

    Backward needs the values and nothing of their size besides: memory is linear in depth. The last
    value gives the layout: earlier ones may be views whose odd strides a batch norm takes wrongly.

    Shapes: weights (B, T, C), T values (B, C, H, W), offset (B, C) -> (B, C, H, W).
    """
    *earlier, (weight, last) = zip(weights.unbind(1), values, strict=True)
    out = scale_map(last, weight, offset)  # (B, C, H, W)
    for weight, value in earlier:
        out = torch.addcmul(out, on_map(weight, value), value)
    return out


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


@torch.fx.wrap  # it depends on the precision
def linear_attention(query: Tensor, state: Tensor, normaliser: Tensor) -> Tensor:
    """Linearised layer attention, phi(q) U / (phi(q) Z), per head (App. A.3).

    Where every key of a head so far is below about -43, phi(q) Z leaves what float32 can divide by
    (float64: -354), and the result fades to 0.

    Shapes: query (B, G, E), state U (B, G, E, D, H, W), normaliser Z (B, G, E) -> (B, C, H, W).
    """
    # A common factor of phi(q) cancels; taken out, the sum is that of Z alone, held where its
    # square is above 0.
    shift = query.amax(-1, keepdim=True).clamp(max=0)  # (B, G, 1)
    phi = feature_map(query - shift)  # (B, G, E)
    phi = phi / phi.sum(-1, keepdim=True)
    total = (phi * normaliser).sum(-1, keepdim=True)  # (B, G, 1)
    weights = phi / total.clamp_min(torch.finfo(total.dtype).tiny ** 0.5)
    with without_autocast(state):
        return torch.einsum("bge,bgedhw->bgdhw", weights.to(state.dtype), state).flatten(1, 2)


def frozen_norm(norm: torch.nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Scale and offset (C,) of a batch norm with frozen statistics, norm(o) = scale o + offset."""
    variance = norm.running_var.to(accumulation_dtype(norm.running_var))
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    offset = -norm.running_mean * scale
    return scale, offset if norm.bias is None else norm.bias + offset


# Cheaper forms. A depthwise convolution is linear in its kernel, and its kernel can be another one
# for each sample, so a factor g per sample and channel moves into it, and the identity as well:
#
#     g dw(x; W) = dw(x; g W)          x + g dw(x; W) + t = dw(x; g W + delta) + t
#
# with delta 1 in the centre and 0 around it. The map dw(x; W) is then neither written nor saved for
# the gradient of g.


@torch.fx.wrap  # the choice depends on the map
def scaled_value(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    offset: Tensor | None = None,
    *,
    residual: bool = False,
) -> Tensor:
    """Return gain f_V(x) + offset, with residual x + gain f_V(x) + offset.

    Shapes: x (B, C, H, W), weight (C, 1, 3, 3), gain and offset (B, C) -> (B, C, H, W).
    """
    if not prefers_kernels_per_sample(x):
        out = scale_map(depthwise_value(x, weight), gain, offset)
    elif can_fold_residual(x):
        return depthwise_per_sample(x, kernels_per_sample(weight, gain, identity=residual), offset)
    else:
        out = depthwise_per_sample(x, kernels_per_sample(weight, gain))
        if offset is not None:
            out = out + on_map(offset, out)
    return x + out if residual else out


def kernels_per_sample(weight: Tensor, gain: Tensor, *, identity: bool = False) -> Tensor:
    """Kernels of gain f_V(x), with identity those of x + gain f_V(x).

    Shapes: weight (C, 1, 3, 3), gain (B, C) -> (B, C, 3, 3).
    """
    kernels = gain[..., None, None] * weight.view(gain.shape[1], 3, 3)
    if identity:
        kernels = kernels + F.pad(gain.new_ones(1, 1), (1, 1, 1, 1))  # delta
    return kernels


def can_fold_residual(x: Tensor) -> bool:
    """Whether delta and offset move into a convolution: in half precision they lose too much.

    Compilers, which fuse them themselves, cannot ask for autocast.
    """
    if is_compiling() or x.dtype != torch.float32:
        return False
    return not is_autocast_enabled(x.device.type)


def prefers_kernels_per_sample(x: Tensor) -> bool:
    """Whether a kernel for each sample pays: where it is not turned into a loop over channels.

    Compilers and exporters fuse a factor on the value themselves.
    """
    if is_compiling() or torch.jit.is_tracing() or not x.is_contiguous() or not x.numel():
        return False
    return x.is_cuda or x.dtype == torch.float32


def depthwise_per_sample(x: Tensor, kernels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel of each sample with a kernel of its own.

    Shapes: x (B, C, H, W), kernels (B, C, 3, 3), bias (B, C) -> (B, C, H, W).
    """
    batch, channels, height, width = x.shape
    groups = batch * channels
    out = F.conv2d(
        x.reshape(1, groups, height, width),
        kernels.to(x.dtype).reshape(groups, 1, 3, 3),
        None if bias is None else bias.reshape(groups),
        padding=1,
        groups=groups,
    )
    return out.reshape(x.shape)
