"""Multi-scale deformable attention (Zhu et al., ICLR 2021) through mmcv's own PyTorch version.

As in mmcv's kernels, a sample exactly one row or column in front of the map gives its location no
gradient. Deformable DETR starts with such samples at the border.
"""

from functools import partial

import torch
from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute, write_gradients


def ms_deform_attn_forward(value, shapes, starts, locations, weights, **rest) -> Tensor:
    """Return the attended values, (B, queries, heads * channels)."""
    return compute(partial(_attend, shapes), value, locations, weights).to(value.dtype)


def ms_deform_attn_backward(
    value, shapes, starts, locations, weights, grad_output, *grad_inputs, **rest
) -> None:
    """Write the gradients of value, sampling locations and attention weights."""
    inputs = (value, locations, weights)
    write_gradients(partial(_attend, shapes), inputs, grad_inputs, grad_output)


def _attend(shapes: Tensor, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops import multi_scale_deform_attn as mmcv  # imports this package's ops

    pixels = locations * shapes.flip(1)[:, None] - 0.5  # (B, queries, heads, levels, points, 2)
    locations = torch.where(pixels <= -1, locations.detach(), locations)
    return mmcv.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
