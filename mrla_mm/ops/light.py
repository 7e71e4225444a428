"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut, or the last layer's o
    y = x + keep norm(o)        with a norm, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the
gradients. A second derivative raises.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.ops.coefficients import FrozenNorm, State, Weights, cat_chunks, take
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.reference import without_autocast


def disable_autocast(x: Tensor) -> AbstractContextManager:
    """Do what `without_autocast` does at a tenth of its cost, where torch can (from 2.1 on)."""
    guard = torch._C._DisableAutocast
    return guard() if hasattr(guard, "__enter__") else without_autocast(x)


def dense_format(x: Tensor) -> torch.memory_format:
    """Layout that the maps are computed in: that of x where it is one of the two dense ones.

    The patches behind a class token are channels-last but for the gap between samples: they are
    copied, not transposed, except on a CPU, whose passes are several times as fast on contiguous
    maps.
    """
    last = (
        x.is_contiguous(memory_format=torch.channels_last)
        or x.device.type != "cpu"
        and x.stride(1) == 1
    )
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def match_layout(tensor: Tensor, x: Tensor) -> Tensor:
    """Tensor in the precision and layout of x; itself if it has both already.

    Raises:
        InputError: it is of another shape than x.
    """
    if tensor.shape != x.shape:
        raise InputError(
            f"maps of a stage must have one shape, got {tuple(tensor.shape)} and {tuple(x.shape)}"
        )
    tensor = tensor if tensor.dtype == x.dtype else tensor.to(x.dtype)
    return tensor.contiguous(memory_format=dense_format(x))


def cast_gradients(
    gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients in the precision of their tensors; None where there is no tensor."""
    pairs = zip(gradients, tensors, strict=True)
    return [
        None if grad is None or tensor is None else grad.to(tensor.dtype) for grad, tensor in pairs
    ]


def sum_partials(partials: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients of parameters, summed over parts of the batch."""
    return [
        None if parts[0] is None else sum(parts[1:], parts[0])
        for parts in zip(*partials, strict=True)
    ]


def refuse_second_derivative() -> None:
    """Raise RuntimeError if autograd records a backward pass, whose gradient would silently be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused layer attention has no second derivative; set MRLA_OPS=naive in the environment"
        )


class LightFunction(torch.autograd.Function):
    """Autograd of MRLA-light; the module has the equations.

    Tensors: the four of Weights, then the five of FrozenNorm or None. Saved: x, the history, the
    seven of State, and the tensors.
    """

    @staticmethod
    def forward(ctx, path, heads, has_history, add_relu, eps, c, shortcut, *tensors):
        """Compute y (B, C, H, W)."""
        passes, (weights, norm) = passes_of(path), unpack(tensors, eps)
        x, y, states = torch.empty_like(c) if add_relu else c, torch.empty_like(c), []
        with disable_autocast(c):
            for samples in passes.chunks(c):
                part, history, pooled = take(x, samples), take(shortcut, samples), None
                if add_relu:
                    pooled = passes.add_relu(
                        take(c, samples), history, out=part, pool=weights.query is not None
                    )
                elif weights.query is not None:
                    pooled = passes.pool(part)
                state = passes.attention_state(
                    part,
                    pooled,
                    weights,
                    take(norm, samples),
                    heads=heads,
                    softmax=False,
                    has_history=has_history,
                )
                passes.apply(
                    part, history if has_history else None, weights.value, state,
                    residual=norm is not None, out=take(y, samples),
                )  # fmt: skip
                states.append(state)
        ctx.save_for_backward(x, shortcut if has_history else None, *cat_chunks(states), *tensors)
        ctx.options = path, has_history, add_relu, eps
        return y

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and the parameters."""
        refuse_second_derivative()
        path, has_history, add_relu, eps = ctx.options
        x, history, *small = ctx.saved_tensors
        state, tensors, passes = State(*small[:7]), small[7:], passes_of(path)
        weights, norm = unpack(tensors, eps)
        grad, grad_x, partials = match_layout(grad, x), torch.empty_like(x), []
        grad_shortcut = torch.empty_like(x) if has_history else None
        with disable_autocast(x):
            for samples in passes.chunks(x):
                part, grad_part, known = take(x, samples), take(grad, samples), take(state, samples)
                sums = passes.grid_sums(
                    grad_part,
                    part,
                    take(history, samples),
                    value=weights.value is not None,
                    shift=norm is not None,
                )
                constant, gradients, _ = passes.attention_backward(
                    part, known, weights, take(norm, samples), sums, softmax=False
                )
                passes.apply_backward(
                    grad_part, weights.value, known._replace(shift=constant), residual=norm is not None,
                    positive=part if add_relu else None,
                    grad_x=take(grad_x, samples), grad_history=take(grad_shortcut, samples),
                )  # fmt: skip
                partials.append(gradients)
        if add_relu and not has_history:
            grad_shortcut = grad_x
        gradients = cast_gradients(sum_partials(partials), tensors[:6])
        return None, None, None, None, None, grad_x, grad_shortcut, *gradients, None, None, None


def unpack(tensors: Sequence[Tensor | None], eps: float) -> tuple[Weights, FrozenNorm | None]:
    """Weights and norm of the first nine tensors of a Function."""
    return Weights(*tensors[:4]), None if tensors[6] is None else FrozenNorm(*tensors[4:9], eps)


def light_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Weights,
    *,
    heads: int,
    has_history: bool,
    add_relu: bool = False,
    norm: FrozenNorm | None = None,
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
        norm: frozen norm and drop path of the residual branch, with which the residual is added.

    Shapes:
        c and shortcut (B, C, H, W) -> (B, C, H, W).
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if has_history or add_relu else None
    *of_norm, eps = norm or (None,) * 6
    return LightFunction.apply(
        path, heads, has_history, add_relu, eps, c, shortcut, *weights, *of_norm
    )
