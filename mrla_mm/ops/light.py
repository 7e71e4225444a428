"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut
    y = x + keep (scale o + offset)     with an affine, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the gradients. A second
derivative raises.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrla_mm.errors import InputError
from mrla_mm.ops.coefficients import Affine, Gate, LightWeights, cat_chunks, take
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.reference import without_autocast


def dense_format(x: Tensor) -> torch.memory_format:
    """Layout that the maps are computed in: that of x where it is one of the two dense ones."""
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def match_layout(tensor: Tensor, x: Tensor) -> Tensor:
    """Tensor in the precision and layout of x; itself if it has both already.

    Raises:
        InputError: it is of another shape than x.
    """
    if tensor.shape != x.shape:
        raise InputError(f"maps of a stage must have one shape, got {tuple(tensor.shape)} and {tuple(x.shape)}")
    return tensor.to(x.dtype).contiguous(memory_format=dense_format(x))


def cast_gradients(gradients: list[Tensor | None], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients in the precision of their tensors; None where there is no tensor."""
    pairs = zip(gradients, tensors, strict=True)
    return [None if grad is None or tensor is None else grad.to(tensor.dtype) for grad, tensor in pairs]


def sum_partials(partials: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients of parameters, summed over parts of the batch."""
    return [None if parts[0] is None else sum(parts[1:], parts[0]) for parts in zip(*partials, strict=True)]


class LightFunction(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx, path, heads, history, add_relu, c, shortcut, *tensors):
        """Compute y (B, C, H, W); tensors: the four of LightWeights, then the three of Affine."""
        passes, weights = passes_of(path), LightWeights(*tensors[:4])
        affine = None if tensors[4] is None else Affine(*tensors[4:])
        x, y, gates = torch.empty_like(c) if add_relu else c, torch.empty_like(c), []
        with without_autocast(c):
            for samples in passes.chunks(c):
                part, previous, factors = x[samples], shortcut[samples] if history else None, take(affine, samples)
                pooled = None
                if add_relu:
                    pooled = passes.add_relu(c[samples], shortcut[samples], out=part, pool=weights.query is not None)
                elif weights.query is not None:
                    pooled = passes.pool(part)
                gate, coefficients = passes.light_coefficients(
                    part, Gate(pooled), weights, factors, heads=heads, history=history
                )
                passes.apply(part, previous, coefficients, residual=affine is not None, out=y[samples])
                gates.append(gate)
        ctx.save_for_backward(x, shortcut if history else None, *cat_chunks(gates), *tensors)
        ctx.path, ctx.heads, ctx.history, ctx.add_relu = path, heads, history, add_relu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and all tensors but keep."""
        x, shortcut, *small = ctx.saved_tensors
        gate, weights, passes = Gate(*small[:3]), LightWeights(*small[3:7]), passes_of(ctx.path)
        affine = None if small[7] is None else Affine(*small[7:])
        grad = match_layout(grad, x)
        grad_x, partials = torch.empty_like(x), []
        grad_shortcut = torch.empty_like(x) if ctx.history else None
        with without_autocast(x):
            for samples in passes.chunks(x):
                part, upstream, factors = x[samples], grad[samples], take(affine, samples)
                previous = shortcut[samples] if ctx.history else None
                own, coefficients = passes.light_coefficients(
                    part, take(gate, samples), weights, factors, heads=ctx.heads, history=ctx.history
                )
                taps = coefficients.taps.shape[-1]
                sums = passes.grid_sums(upstream, part, previous, taps, shift=affine is not None)
                constant, gradients = passes.light_coefficients_backward(part, own, weights, factors, sums)
                passes.apply_backward(
                    upstream, coefficients._replace(shift=constant), residual=affine is not None,
                    positive=part if ctx.add_relu else None,
                    grad_x=grad_x[samples], grad_previous=grad_shortcut[samples] if ctx.history else None,
                )  # fmt: skip
                partials.append(gradients)
        if ctx.add_relu and not ctx.history:
            grad_shortcut = grad_x
        gradients = cast_gradients(sum_partials(partials), (*weights, *small[7:9]))
        return None, None, None, None, grad_x, grad_shortcut, *gradients, None


def light_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: LightWeights,
    *,
    heads: int,
    history: bool,
    add_relu: bool = False,
    affine: Affine | None = None,
) -> Tensor:
    """MRLA-light by a fused path; see the module for the equations.

    Args:
        path: "fused" or "triton".
        c: x itself or, with add_relu, the block's output before the sum.
        shortcut: the history and, with add_relu, what is added to c; None where there is neither.
        weights: parameters of the layer.
        heads: G.
        history: whether the shortcut is the history.
        add_relu: whether x = relu(c + shortcut).
        affine: frozen norm and drop path of the residual branch, with which the residual is added.

    Shapes:
        c and shortcut (B, C, H, W) -> (B, C, H, W).
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if shortcut is not None and (history or add_relu) else None
    return LightFunction.apply(path, heads, history, add_relu, c, shortcut, *weights, *(affine or (None, None, None)))
