"""MRLA-base as one autograd Function, with or without the sum, ReLU, norm and residual around it.

    x = relu(c + shortcut)              with add_relu, else x = c
    o = sum_s softmax_s(q . k_s / sqrt(D)) v_s    Eq. 6, over the stage's layers, the last of whose values is dw(x)
    y = x + keep (scale o + offset)     with an affine, else y = o

Saved for backward are x, the values and small tensors; each value is read once in either direction. A second derivative
raises.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrla_mm.ops.coefficients import Affine, Coefficients, at_least_2d, product, take, unpack_affine
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.light import cast_gradients, dense_format, match_layout, refuse_second_derivative
from mrla_mm.ops.reference import at_least_float32, base_scores, without_autocast


def expand_scores(scores: Tensor, channels: int) -> Tensor:
    """Repeat scores over the channels of their heads, in at least single precision: (B, G, T) -> (B, C, T)."""
    return at_least_float32(scores).repeat_interleave(channels // scores.shape[1], dim=1)


def value_weights(scores: Tensor, affine: Affine | None, channels: int) -> Tensor:
    """Factor of each value, keep scale score: scores (B, G, T) -> (B, C, T)."""
    scale, _, keep = unpack_affine(affine)
    weights = expand_scores(scores, channels)
    factor = at_least_2d(product(scale, keep))  # (B or 1, C)
    return weights.contiguous() if factor is None else (weights * factor.unsqueeze(-1)).contiguous()


def value_taps(x: Tensor, weight: Tensor) -> Coefficients:
    """Coefficients of the value dw(x; weight), the same for all samples."""
    taps = at_least_float32(weight).flatten(1).expand(*x.shape[:2], -1)
    return Coefficients(taps.contiguous())


class BaseFunction(torch.autograd.Function):
    """Autograd of MRLA-base; the module has the equations."""

    @staticmethod
    def forward(ctx, path, heads, add_relu, c, shortcut, *tensors):
        """Compute y (B, C, H, W), key (B, G, D) and value (B, C, H, W).

        tensors: weights of query, key and value; Affine; T - 1 earlier keys; as many earlier values.
        """
        passes, ((query, key, value), affine, (keys, values)) = passes_of(path), unpack(tensors)
        x, y, new_value = torch.empty_like(c) if add_relu else c, torch.empty_like(c), torch.empty_like(c)
        found = []
        with without_autocast(c):
            for samples in passes.chunks(c):
                part = x[samples]
                if add_relu:
                    pooled = passes.add_relu(c[samples], shortcut[samples], out=part, pool=True)
                else:
                    pooled = passes.pool(part)
                passes.apply(part, None, value_taps(part, value), residual=False, out=new_value[samples])
                scores, new_key = base_scores(pooled, query, key, [k[samples] for k in keys], heads)
                factors = take(affine, samples)
                passes.weighted_sum(
                    None if affine is None else part,
                    value_weights(scores, factors, c.shape[1]),
                    branch_offset(factors),
                    [v[samples] for v in (*values, new_value)],
                    out=y[samples],
                )
                found.append((pooled, new_key))
        pooled, new_key = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(x, pooled, new_value, *tensors)
        ctx.set_materialize_grads(False)  # nobody asks for key and value of a stage's last layer
        ctx.path, ctx.heads, ctx.add_relu = path, heads, add_relu
        return y, new_key, new_value

    @staticmethod
    def backward(ctx, grad, grad_key, grad_value):
        """Compute the gradients of c, the shortcut, and all tensors but keep."""
        refuse_second_derivative()
        x, pooled, new_value, *tensors = ctx.saved_tensors
        passes, ((query, key, value), affine, (keys, values)) = passes_of(ctx.path), unpack(tensors)
        values, scale = (*values, new_value), None if affine is None else affine.scale
        with without_autocast(x):
            grad = torch.zeros_like(x) if grad is None else match_layout(grad, x)
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in (pooled, query, key, *keys)]
                scores, new_key = base_scores(*leaves[:3], leaves[3:], ctx.heads)
            grad_values = [torch.empty_like(v) for v in values]
            weights, found = value_weights(scores.detach(), affine, x.shape[1]), []
            for samples in passes.chunks(x):
                gradients = [g[samples] for g in grad_values]
                sums = passes.weighted_sum_backward(
                    grad[samples], weights[samples], [v[samples] for v in values], gradients
                )
                found.append((sums, None if affine is None else passes.pool(grad[samples])))
            sums = torch.cat([part for part, _ in found])  # (B, C, T)
            means = None if affine is None else torch.cat([part for _, part in found]) * (x.shape[2] * x.shape[3])
            grad_scores, grad_scale, grad_offset = scores_backward(sums, means, scores.detach(), affine)
            grad_key = torch.zeros_like(new_key) if grad_key is None else grad_key
            grad_pooled, *small = torch.autograd.grad((scores, new_key), leaves, (grad_scores, grad_key))
            own = grad_values.pop()
            if grad_value is not None:
                own.add_(grad_value)
            grad_x, grad_weight = torch.empty_like(x), []
            constant = grad_pooled / (x.shape[2] * x.shape[3])
            for samples in passes.chunks(x):
                part, gradient = x[samples], grad_x[samples]
                taps = value_taps(part, value)
                grad_weight.append(passes.grid_sums(own[samples], part, None, taps.taps.shape[-1], shift=False).taps)
                shifted = taps._replace(shift=constant[samples])
                passes.apply_backward(own[samples], shifted, residual=False, grad_x=gradient)
                if affine is not None:
                    gradient.add_(grad[samples])
                if ctx.add_relu:
                    torch.ops.aten.threshold_backward.grad_input(gradient, part, 0, grad_input=gradient)
        grad_weight = sum(part.sum(0) for part in grad_weight).view_as(value)
        branch = cast_gradients([grad_weight, grad_scale, grad_offset], (value, scale, scale))
        grad_shortcut = grad_x if ctx.add_relu else None
        return None, None, None, grad_x, grad_shortcut, *small[:2], *branch, None, *small[2:], *grad_values


def unpack(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Affine | None, tuple[Sequence[Tensor], ...]]:
    """Weights of query, key and value, the affine, and the earlier keys and values."""
    depth = (len(tensors) - 6) // 2
    affine = None if tensors[3] is None else Affine(*tensors[3:6])
    return tensors[:3], affine, (tensors[6 : 6 + depth], tensors[6 + depth :])


def branch_offset(affine: Affine | None) -> Tensor | None:
    """What is added to the sum, keep offset: (B or 1, C)."""
    _, offset, keep = unpack_affine(affine)
    return at_least_2d(product(offset, keep))


def scores_backward(
    sums: Tensor, grad_sums: Tensor | None, scores: Tensor, affine: Affine | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the scores (B, G, T), of scale and of offset (C,).

    They follow from the sums over the grid of grad times each value (B, C, T) and of grad (B, C).
    """
    (scale, _, keep), heads = unpack_affine(affine), scores.shape[1]
    grad_scale = grad_offset = None
    if scale is not None:
        grad_scale = product((sums * expand_scores(scores, sums.shape[1])).sum(-1), keep).sum(0)
        grad_offset = product(grad_sums, keep).sum(0)
        sums = sums * at_least_2d(product(scale, keep)).unsqueeze(-1)
    return sums.unflatten(1, (heads, -1)).sum(2).to(scores.dtype), grad_scale, grad_offset


def base_fused(
    path: str,
    c: Tensor,
    shortcut: Tensor | None,
    weights: Sequence[Tensor],
    earlier: tuple[Sequence[Tensor], Sequence[Tensor]],
    *,
    heads: int,
    add_relu: bool = False,
    affine: Affine | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """MRLA-base by a fused path; see the module for the equations.

    Args:
        path: "fused" or "triton".
        c: x itself or, with add_relu, the block's output before the sum.
        shortcut: what add_relu adds to c, else not used.
        weights: of query, key and value.
        earlier: keys (B, G, D) and values (B, C, H, W) of the stage's earlier layers.
        heads: G.
        add_relu: whether x = relu(c + shortcut).
        affine: frozen norm and drop path of the residual branch, with which the residual is added.

    Shapes:
        c and shortcut (B, C, H, W) -> y (B, C, H, W), and the layer's own key (B, G, D) and value (B, C, H, W).
    """
    c = c.contiguous(memory_format=dense_format(c))
    shortcut = match_layout(shortcut, c) if add_relu else None
    keys, values = earlier
    tensors = (*weights, *(affine or (None, None, None)), *keys, *(match_layout(value, c) for value in values))
    return BaseFunction.apply(path, heads, add_relu, c, shortcut, *tensors)
