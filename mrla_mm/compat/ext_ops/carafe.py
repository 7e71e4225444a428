"""CARAFE (Wang et al., ICCV 2019): upsampling with a kernel of its own for every output cell."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import unfold

from mrla_mm.compat.ext_ops.common import compute, write_gradients


def carafe_forward(features, masks, rfeatures, *buffers, **geometry) -> None:
    """Upsample into the last buffer; ``rfeatures`` gets a copy of the features for the backward.

    ``masks`` (B, group_size * kernel_size^2, H * scale_factor, W * scale_factor) are the kernels,
    per channel group.
    """
    rfeatures.copy_(features)
    buffers[-1].copy_(compute(partial(_reassemble, **geometry), features, masks))


def carafe_backward(grad_output, rfeatures, masks, *buffers, **geometry) -> None:
    """Write the gradients of features and masks into the last two buffers."""
    write_gradients(partial(_reassemble, **geometry), (rfeatures, masks), buffers[-2:], grad_output)


def _reassemble(
    features: Tensor, masks: Tensor, *, kernel_size: int, group_size: int, scale_factor: int
) -> Tensor:
    """Each output cell is a weighted sum of the cells around its source cell."""
    batch, channels, height, width = features.shape
    taps = kernel_size**2
    patches = unfold(features, kernel_size, padding=kernel_size // 2)
    patches = patches.view(batch, group_size, channels // group_size, taps, height, width)
    cells = (height, scale_factor, width, scale_factor)
    kernels = masks.view(batch, group_size, taps, *cells)
    out = torch.einsum("bgcthw,bgthiwj->bgchiwj", patches, kernels)
    return out.reshape(batch, channels, height * scale_factor, width * scale_factor)
