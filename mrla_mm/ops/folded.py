"""The maps' part of fused layer attention in plain PyTorch: a few passes over memory, nothing kept.

One depthwise convolution over B * C channels with the weights of each sample does gate, value, normalisation and
residual; adding the history is one more operation. On a CPU a few samples at a time go through all of it, so that they
stay in its cache and no map-sized temporary is allocated. Gradients of the weights are sums over the grid (`gating`).
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.gating import Coefficients, MapSums, wide

# Bytes of one map that go through all operations at a time: several maps of this size fit the last-level cache of a
# CPU, and the system hands out blocks below some 32 MiB from memory it has used before.
CHUNK_BYTES = 13 * 2**20
# In less precision the residual comes last: its weight of 1, or itself, would swallow what is small beside it.
EXACT = (torch.float32, torch.float64)


def parts(x: Tensor) -> Iterator[slice]:
    """Slices of the batch, of one size, whose maps fit the cache of a CPU; the whole batch elsewhere."""
    batch = max(x.shape[0], 1)
    count = math.ceil(x.nbytes / CHUNK_BYTES) if x.device.type == "cpu" else 1
    step = math.ceil(batch / max(count, 1))
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)


def chunks(x: Tensor) -> Iterator[slice]:
    """`parts` that `depthwise` can take: a CPU's channels-last maps go one by one."""
    if x.device.type != "cpu" or x.is_contiguous():
        return parts(x)
    return (slice(sample, sample + 1) for sample in range(x.shape[0]))


def pool(x: Tensor) -> Tensor:
    """Average over the grid in at least single precision: (B, C, H, W) -> (B, C)."""
    return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def grid_sum(x: Tensor) -> Tensor:
    """Sum over the grid in at least single precision: (B, C, H, W) -> (B, C)."""
    return x.sum(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def on_grid(per_channel: Tensor, like: Tensor) -> Tensor:
    """Numbers per channel that multiply a map in its precision: (B, C) -> (B, C, 1, 1)."""
    return per_channel.to(like.dtype)[:, :, None, None]


def of_samples(per_channel: Tensor, samples: slice) -> Tensor:
    """Numbers of some samples, where each sample has its own: (B or 1, C) -> (b or 1, C)."""
    return per_channel if per_channel.shape[0] == 1 else per_channel[samples]


def depthwise(x: Tensor, taps: Tensor, shift: Tensor | None) -> Tensor:
    """Depthwise 3x3 convolution (or product, with one tap) in which each sample has its own weights.

    Contiguous maps are one map of b * c channels; channels-last maps cannot be seen so, and are single samples.

    Shapes:
        x (b, c, H, W), taps (b, c, 9 or 1), shift (b or 1, c) -> (b, c, H, W).
    """
    batch, channels = x.shape[:2]
    if shift is not None:
        shift = shift.to(x.dtype).expand(batch, channels).reshape(-1)
    if taps.shape[-1] == 1:
        out = x * on_grid(taps[..., 0], x)
        return out if shift is None else out.add_(shift.view(batch, channels, 1, 1))
    weight = taps.to(x.dtype).reshape(batch * channels, 1, 3, 3)
    as_one = x.reshape(1, batch * channels, *x.shape[2:])
    return F.conv2d(as_one, weight, shift, padding=1, groups=batch * channels).view(x.shape)


def activate(c: Tensor, shortcut: Tensor, *, pooled: bool) -> tuple[Tensor, Tensor | None]:
    """Compute x = relu(c + shortcut), (B, C, H, W), and its average over the grid (B, C) if wanted."""
    x = torch.empty_like(c)
    averages = x.new_empty(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32)) if pooled else None
    for samples in parts(c):
        part = torch.add(c[samples], shortcut[samples], out=x[samples]).relu_()
        if pooled:
            averages[samples] = pool(part)
    return x, averages


def light_forward(
    x: Tensor, previous: Tensor | None, coefficients: Coefficients, *, residual: bool, out: Tensor | None = None
) -> Tensor:
    """Map part of light attention: [x +] dw(x; taps) + slope previous + shift, all (B, C, H, W)."""
    taps, slope, shift = coefficients
    fold = residual and x.dtype in EXACT
    if fold:
        taps = taps.clone()
        taps[..., taps.shape[-1] // 2].add_(1)
    last = residual and not fold
    several = list(chunks(x))
    if out is None and len(several) == 1 and x.is_contiguous() and previous is None and not last:
        return depthwise(x, taps, shift)
    out = torch.empty_like(x) if out is None else out
    for samples in several:
        part = depthwise(x[samples], taps[samples], None if shift is None else of_samples(shift, samples))
        if previous is not None:
            target = None if last else out[samples]
            part = torch.addcmul(part, previous[samples], on_grid(of_samples(slope, samples), x), out=target)
        elif not last:
            out[samples] = part
        if last:
            torch.add(x[samples], part, out=out[samples])
    return out


def light_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, *, shift: bool) -> MapSums:
    """Sums over the grid that the gradients of all weights follow from; size taps, 9 or 1, and shift if wanted."""
    if not x.shape[0]:
        none = x.new_empty(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        return MapSums(none.unsqueeze(-1).expand(-1, -1, size), none if previous is not None else None, none)
    found = [part_sums(grad[s], x[s], None if previous is None else previous[s], size, shift=shift) for s in chunks(x)]
    return MapSums(*(joined(numbers) for numbers in zip(*found, strict=True)))


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Numbers of all samples from those of parts of the batch."""
    return parts[0] if parts[0] is None or len(parts) == 1 else torch.cat(parts)


def part_sums(grad: Tensor, x: Tensor, previous: Tensor | None, size: int, *, shift: bool) -> MapSums:
    """`light_sums` of as many samples as `depthwise` takes."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    by_slope = None if previous is None else grid_sum(grad.to(dtype) * previous)
    if size == 1:
        return MapSums(grid_sum(wide(grad) * x).unsqueeze(-1), by_slope, grid_sum(grad) if shift else None)
    groups, with_bias = x.shape[0] * x.shape[1], shift and x.dtype in EXACT
    as_one = (1, groups, *x.shape[2:])
    weight = x.new_empty(groups, 1, 3, 3)  # only its shape matters: the gradient of a convolution's weight and bias
    arguments = ([groups], (1, 1), (1, 1), (1, 1), False, (0, 0), groups, (False, True, with_bias))
    backward = torch.ops.aten.convolution_backward
    _, by_taps, by_shift = backward(grad.reshape(as_one), x.reshape(as_one), weight, *arguments)
    if shift:
        by_shift = by_shift.view(x.shape[:2]) if with_bias else grid_sum(grad)
    return MapSums(by_taps.to(dtype).view(*x.shape[:2], size), by_slope, by_shift if shift else None)


def light_backward(
    grad: Tensor, coefficients: Coefficients, constant: Tensor | None, *, residual: bool, history: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and previous: the transposed of `light_forward`, plus a constant per sample and channel."""
    transposed = Coefficients(coefficients.taps.flip(-1), None, constant)
    by_x = light_forward(grad, None, transposed, residual=residual)
    return by_x, grad * on_grid(coefficients.slope, grad) if history else None


def block_backward(
    grad: Tensor,
    x: Tensor,
    coefficients: Coefficients,
    constant: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients through `light_forward` with residual and `activate`'s ReLU: of c, and of the shortcut.

    The latter has the history's part if the coefficients have a slope; without, they are one. Written to out if given.
    """
    transposed, slope = Coefficients(coefficients.taps.flip(-1), None, constant), coefficients.slope
    if out is None:
        by_shortcut = torch.empty_like(grad)
        out = by_shortcut if slope is None else torch.empty_like(grad), by_shortcut
    by_c, by_shortcut = out
    for samples in chunks(grad):
        part, masked = grad[samples], by_c[samples]
        by_x = light_forward(part, None, transposed.of(samples), residual=True)
        torch.ops.aten.threshold_backward.grad_input(by_x, x[samples], 0, grad_input=masked)
        if slope is not None:
            torch.addcmul(masked, part, on_grid(of_samples(slope, samples), part), out=by_shortcut[samples])
    return out


def sum_forward(x: Tensor | None, weights: Tensor, shift: Tensor | None, values: Sequence[Tensor]) -> Tensor:
    """Weighted sum of values, [x +] sum_s weights_s values_s [+ shift], each read once.

    Shapes:
        x and T values (B, C, H, W), weights (B, C, T), shift (B or 1, C) -> (B, C, H, W).
    """
    out = torch.empty_like(values[0])
    first = x is not None and out.dtype in EXACT
    for samples in chunks(out):
        factors = [on_grid(weight[samples], out) for weight in weights.unbind(-1)]
        parts = [value[samples] for value in values]
        if first:
            total = torch.addcmul(x[samples], parts[0], factors[0], out=out[samples])
        else:
            total = torch.mul(parts[0], factors[0], out=out[samples])
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total.addcmul_(part, factor)
        if shift is not None:
            total.add_(on_grid(of_samples(shift, samples), out))
        if x is not None and not first:
            total.add_(x[samples])
    return out


def sum_backward(grad: Tensor, weights: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sums over the grid of grad times each value (B, C, T), and the gradients of the values, weights_s grad."""
    sums = torch.empty_like(weights)
    gradients = [torch.empty_like(value) for value in values]
    for samples in chunks(grad):
        part = grad[samples]
        for index, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            into = gradient[samples]
            sums[samples, :, index] = grid_sum(torch.mul(part, value[samples], out=into))
            torch.mul(part, on_grid(weights[samples, :, index], part), out=into)
    return sums, gradients
