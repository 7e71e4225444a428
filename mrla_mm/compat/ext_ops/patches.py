"""CARAFE (Wang et al., ICCV 2019) and masked convolution (Wang et al., CVPR 2019)."""

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


def masked_im2col_forward(im, rows, columns, col, *, kernel_h, kernel_w, pad_h, pad_w) -> None:
    """Write the patches of ``im`` (1, C, H, W) at n output cells into ``col`` (C * taps, n)."""
    width = im.shape[3] + 2 * pad_w - kernel_w + 1
    (patches,) = unfold(im, (kernel_h, kernel_w), padding=(pad_h, pad_w))
    col.copy_(patches[:, rows * width + columns])


def masked_col2im_forward(col, rows, columns, im, **_) -> None:
    """Write ``col`` (C, n) to the given cells of ``im`` (1, C, H, W)."""
    im[0, :, rows, columns] = col
