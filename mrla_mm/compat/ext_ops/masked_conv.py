"""Convolution of one image at the cells of a mask (guided anchoring, Wang et al., CVPR 2019)."""

from torch.nn.functional import unfold


def masked_im2col_forward(im, rows, columns, col, *, kernel_h, kernel_w, pad_h, pad_w) -> None:
    """Write the patches of ``im`` (1, C, H, W) at n output cells into ``col`` (C * taps, n)."""
    width = im.shape[3] + 2 * pad_w - kernel_w + 1
    (patches,) = unfold(im, (kernel_h, kernel_w), padding=(pad_h, pad_w))
    col.copy_(patches[:, rows * width + columns])


def masked_col2im_forward(col, rows, columns, im, **_) -> None:
    """Write ``col`` (C, n) to the given cells of ``im`` (1, C, H, W)."""
    im[0, :, rows, columns] = col
