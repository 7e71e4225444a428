"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut, or the last layer's o
    y = x + keep (scale o + offset)     with an affine, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the gradients. A second
derivative raises.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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


def cast_gradients(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients in the precision of their tensors; None where there is no tensor."""
    pairs = zip(gradients, tensors, strict=True)
    return [None if grad is None or tensor is None else grad.to(tensor.dtype) for grad, tensor in pairs]


def sum_partials(partials: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients of parameters, summed over parts of the batch."""
    return [None if parts[0] is None else sum(parts[1:], parts[0]) for parts in zip(*partials, strict=True)]


def refuse_second_derivative() -> None:
    """Raise RuntimeError if autograd records a backward pass, whose gradient would silently be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError("fused layer attention has no second derivative; set MRLA_OPS=naive in the environment")


class LightFunction(torch.autograd.Function):
    """Autograd of MRLA-light; the module has the equations.

    Tensors: the four of LightWeights, then the three of Affine or None. Saved: x, the history, the three of Gate, and
    the tensors.
    """

    @staticmethod
    def forward(ctx, path, heads, has_history, add_relu, c, shortcut, *tensors):
        """Compute y (B, C, H, W)."""
        passes, weights, affine = passes_of(path), *unpack(tensors)
        x, y, gates = torch.empty_like(c) if add_relu else c, torch.empty_like(c), []
        with without_autocast(c):
            for samples in passes.chunks(c):
                part, pooled = x[samples], None
                if add_relu:
                    pooled = passes.add_relu(c[samples], shortcut[samples], out=part, pool=weights.query is not None)
                elif weights.query is not None:
                    pooled = passes.pool(part)
                gate, coefficients = passes.light_coefficients(
                    part, Gate(pooled), weights, take(affine, samples), heads=heads, has_history=has_history
                )
                history = shortcut[samples] if has_history else None
                passes.apply(part, history, coefficients, residual=affine is not None, out=y[samples])
                gates.append(gate)
        ctx.save_for_backward(x, shortcut if has_history else None, *cat_chunks(gates), *tensors)
        ctx.path, ctx.heads, ctx.has_history, ctx.add_relu = path, heads, has_history, add_relu
        return y

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and all tensors but keep."""
        refuse_second_derivative()
        x, history, *small = ctx.saved_tensors
        gate, tensors, passes = Gate(*small[:3]), small[3:], passes_of(ctx.path)
        weights, affine = unpack(tensors)
        grad, grad_x, partials = match_layout(grad, x), torch.empty_like(x), []
        grad_shortcut = torch.empty_like(x) if ctx.has_history else None
        with without_autocast(x):
            for samples in passes.chunks(x):
                part, grad_part, factors = x[samples], grad[samples], take(affine, samples)
                known, coefficients = passes.light_coefficients(
                    part, take(gate, samples), weights, factors, heads=ctx.heads, has_history=ctx.has_history
                )
                sums = passes.grid_sums(
                    grad_part, part, history[samples] if ctx.has_history else None, coefficients.taps.shape[-1],
                    shift=affine is not None,
                )  # fmt: skip
                constant, gradients = passes.light_coefficients_backward(part, known, weights, factors, sums)
                passes.apply_backward(
                    grad_part, coefficients._replace(shift=constant), residual=affine is not None,
                    positive=part if ctx.add_relu else None,
                    grad_x=grad_x[samples], grad_history=grad_shortcut[samples] if ctx.has_history else None,
                )  # fmt: skip
                partials.append(gradients)
        if ctx.add_relu and not ctx.has_history:
            grad_shortcut = grad_x
        gradients = cast_gradients(sum_partials(partials), tensors[:-1])
        return None, None, None, None, grad_x, grad_shortcut, *gradients, None


def unpack(tensors: Sequence[Tensor | None]) -> tuple[LightWeights, Affine | None]:
    """Weights and affine of the tensors that `LightFunction` takes."""
    return LightWeights(*tensors[:4]), None if tensors[4] is None else Affine(*tensors[4:])


def light_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: LightWeights,
    *,
    heads: int,
    has_history: bool,
    add_relu: bool = False,
    affine: Affine | None = None,
) -> Tensor:
    """MRLA-light by a fused path; see the module for the equations.

    Args:
        path: "fused" or "triton".
        c: x itself or, with add_relu, the block's output before the sum.
        shortcut: the history p and, with add_relu, what is added to c; None where there is neither.
        weights: parameters of the layer.
        heads: G.
        has_history: whether there is a history.
        add_relu: whether x = relu(c + shortcut).
        affine: frozen norm and drop path of the residual branch, with which the residual is added.

    Shapes:
        c and shortcut (B, C, H, W) -> (B, C, H, W).
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if has_history or add_relu else None
    tensors = (*weights, *(affine or (None, None, None)))
    return LightFunction.apply(path, heads, has_history, add_relu, c, shortcut, *tensors)
