"""MRLA-light as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)      with add_relu, else x = c
    o = gate dw(x) + lambda p   Eq. 8; the history p is the shortcut, or the last layer's o
    y = x + keep norm(o)        with a norm, else y = o

Saved for backward are two maps, x and the history, and small tensors; `coefficients` derives the
gradients. A second derivative raises.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from mrla_mm.errors import InputError
from mrla_mm.ops.coefficients import Layer, Parameters, State, cat_chunks, sum_chunks, take
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.reference import FrozenNorm, Weights, without_autocast


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
    if x.is_contiguous():
        return torch.contiguous_format
    last = x.is_contiguous(memory_format=torch.channels_last)
    patches = x.device.type != "cpu" and x.stride(1) == 1
    return torch.channels_last if last or patches else torch.contiguous_format


def match_layout(tensor: Tensor, x: Tensor) -> Tensor:
    """Tensor in the precision and layout of x; InputError if it is of another shape."""
    if tensor.shape != x.shape:
        raise InputError(
            f"maps of a stage must have one shape, got {tuple(tensor.shape)} and {tuple(x.shape)}"
        )
    return tensor.to(x.dtype).contiguous(memory_format=dense_format(x))


def refuse_second_derivative() -> None:
    """Raise RuntimeError if autograd records a backward pass: its gradient would be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused layer attention has no second derivative; set MRLA_OPS=naive in the environment"
        )


class Options(NamedTuple):
    """What a Function is given besides tensors; see `light_fused`."""

    path: str
    heads: int
    has_history: bool
    add_relu: bool
    eps: float
    project_last: bool = False

    def layer(self, parameters: Parameters) -> Layer:
        """The layer with these options and parameters."""
        query, key, value, history_scale, *norm = parameters
        norm = None if parameters.mean is None else FrozenNorm(*norm, self.eps)
        weights = Weights(query, key, value, history_scale)
        return Layer(weights, norm, self.heads, self.has_history)


def load_saved(ctx) -> tuple[State, Parameters, Sequence[Tensor | None]]:
    """State, parameters and maps, which autograd saves as one flat sequence of tensors."""
    tensors = iter(ctx.saved_tensors)
    state = State(*islice(tensors, len(State._fields)))
    parameters = Parameters(*islice(tensors, len(Parameters._fields)))
    return state, parameters, tuple(tensors)


class LightFunction(torch.autograd.Function):
    """Autograd of MRLA-light; the module has the equations."""

    @staticmethod
    def forward(ctx, options, c, shortcut, *parameters):
        """Compute y (B, C, H, W)."""
        parameters = Parameters(*parameters)
        layer = options.layer(parameters)
        passes = passes_of(options.path)
        has_gate = layer.weights.query is not None
        has_norm = layer.norm is not None
        x = torch.empty_like(c) if options.add_relu else c
        y = torch.empty_like(c)
        states = []
        with disable_autocast(c):
            for samples in passes.chunks(c):
                c_chunk, x_chunk, shortcut_chunk, y_chunk = take(samples, c, x, shortcut, y)
                history = shortcut_chunk if options.has_history else None
                added = shortcut_chunk if options.add_relu else None
                pooled = passes.add_relu(c_chunk, added, out=x_chunk, pool=has_gate)
                state = passes.light_state(x_chunk, pooled, layer.take(samples))
                passes.apply(
                    x_chunk, history, layer.weights.value, state, residual=has_norm, out=y_chunk
                )
                states.append(state)
        history = shortcut if options.has_history else None
        ctx.save_for_backward(*cat_chunks(states), *parameters, x, history)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of c, the shortcut, and the parameters."""
        refuse_second_derivative()
        options = ctx.options
        state, parameters, (x, history) = load_saved(ctx)
        layer = options.layer(parameters)
        value = layer.weights.value
        has_norm = layer.norm is not None
        passes = passes_of(options.path)
        grad = match_layout(grad, x)
        grad_x = torch.empty_like(x)
        grad_history = None if history is None else torch.empty_like(x)
        gradients = []
        with disable_autocast(x):
            for samples in passes.chunks(x):
                grad_chunk, x_chunk, history_chunk = take(samples, grad, x, history)
                grad_x_chunk, grad_history_chunk = take(samples, grad_x, grad_history)
                state_chunk = State(*take(samples, *state))
                sums = passes.grid_sums(
                    grad_chunk, x_chunk, history_chunk, value=value is not None, shift=has_norm
                )
                grad_pixel, of_parameters = passes.light_backward(
                    x_chunk, state_chunk, layer.take(samples), sums
                )
                passes.apply_backward(
                    grad_chunk,
                    value,
                    state_chunk._replace(shift=grad_pixel),
                    residual=has_norm,
                    positive=x_chunk if options.add_relu else None,
                    grad_x=grad_x_chunk,
                    grad_history=grad_history_chunk,
                )
                gradients.append(of_parameters)
        grad_shortcut = grad_history
        if options.add_relu and history is None:
            grad_shortcut = grad_x
        return None, grad_x, grad_shortcut, *sum_chunks(gradients)


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
    """MRLA-light by a fused path: (B, C, H, W); see the module for the equations.

    c is x itself or, with add_relu, the block's output before the sum. The shortcut is the history
    and, with add_relu, what is added to c; None where there is neither. With a norm, which stands
    for frozen norm and drop path of the branch, the residual is added.
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if has_history or add_relu else None
    options = Options(path, heads, has_history, add_relu, 0.0 if norm is None else norm.eps)
    return LightFunction.apply(options, c, shortcut, *Parameters.pack(weights, norm))
