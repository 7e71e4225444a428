"""RoIAlign (He et al., ICCV 2017): a sparse product on a CPU, torchvision's operator elsewhere.

The average of a bin is linear in the map: a sparse (K * PH * PW, B * H * W) matrix times the map as
(B * H * W, C). Its backward is the product with the transpose, where torchvision's is one scalar
thread. The samples of a bin form a grid and bilinear weights are separable, so that a row of the
matrix is the outer product of a few weights per axis.
"""

from typing import NamedTuple

import numpy as np
import torch
import torchvision.ops  # noqa: F401  torch.ops.torchvision
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.nn.functional import embedding_bag

from mrla_mm.compat.ext_ops.common import DIVERGED, compute_dtype
from mrla_mm.errors import InputError

AVG = 1  # mmcv's number of the average
# A sparse product is faster if map and output have at least this many elements, and the map at most
# this many cells per bin.
FORWARD, BACKWARD = (2**18, 5), (2**15, 40)


class Geometry(NamedTuple):
    """mmcv's arguments in torchvision's order."""

    spatial_scale: float
    aligned_height: int  # bins of a RoI
    aligned_width: int
    sampling_ratio: int
    aligned: bool


class Bins(NamedTuple):
    """The bins of K RoIs; each tensor is (K, 2), for y and x, in map coordinates."""

    start: Tensor  # of the first bin
    size: Tensor
    samples: Tensor  # per bin

    @classmethod
    def of(cls, rois: Tensor, geometry: Geometry) -> "Bins":
        """Return the bins of the ``rois`` (K, 5)."""
        corners = rois[:, 1:] * geometry.spatial_scale - (0.5 if geometry.aligned else 0.0)
        start, end = corners[:, [1, 0]], corners[:, [3, 2]]
        extent = end - start if geometry.aligned else (end - start).clamp(min=1)
        size = extent / extent.new_tensor([geometry.aligned_height, geometry.aligned_width])
        ratio = geometry.sampling_ratio
        return cls(start, size, torch.full_like(size, ratio) if ratio > 0 else size.ceil())


def roi_align_forward(input, rois, output, argmax_y, argmax_x, pool_mode, **options) -> None:
    """Pool the ``rois`` (K, 5) of ``input`` (B, C, H, W) into ``output`` (K, C, PH, PW).

    Raises NotImplementedError for the maximum, which alone takes ``argmax_y`` and ``argmax_x``, and
    InputError for boxes with NaN or infinity on a CPU, where they would read other memory.
    """
    geometry = Geometry(**options)
    rois = rois.to(compute_dtype(input))
    sizes = rois[:, 3:] - rois[:, 1:3]
    if rois.device.type == "cpu" and not sizes.isfinite().all():
        first = rois[~sizes.isfinite().all(1)][0].tolist()
        raise InputError(f"roi_align: the box {first[1:]} has NaN or infinity; {DIVERGED}")
    if pool_mode != AVG:
        raise NotImplementedError("roi_align with pool_mode='max' exists only in compiled mmcv")
    if _sparse_is_faster(rois, input, FORWARD, geometry):
        cells = input.permute(0, 2, 3, 1).reshape(-1, input.shape[1]).to(rois.dtype)
        pooled = _product(_matrix(rois, input, geometry), cells)  # (K * PH * PW, C)
        output.copy_(pooled.view(len(rois), *output.shape[2:], -1).permute(0, 3, 1, 2))
    else:
        output.copy_(torch.ops.torchvision.roi_align(input.to(rois.dtype), rois, *geometry))


def roi_align_backward(
    grad_output, rois, argmax_y, argmax_x, grad_input, pool_mode, **options
) -> None:
    """Write the gradient of :func:`roi_align_forward` into ``grad_input`` (B, C, H, W)."""
    geometry = Geometry(**options)
    rois = rois.to(compute_dtype(grad_input))
    grad = grad_output.to(rois.dtype)
    if _sparse_is_faster(rois, grad_input, BACKWARD, geometry):
        bins_grad = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])  # (K * PH * PW, C)
        cells_grad = _product(_matrix(rois, grad_input, geometry).T.tocsr(), bins_grad)
        images = cells_grad.view(len(grad_input), -1, grad.shape[1])  # (B, H * W, C)
        for image, cells in zip(grad_input.flatten(2), images, strict=True):
            image.copy_(cells.T)  # five times as fast as one permuted copy
    else:
        scale, height, width, *sampling = geometry
        backward = torch.ops.torchvision._roi_align_backward
        grad_input.copy_(backward(grad, rois, scale, height, width, *grad_input.shape, *sampling))


def _sparse_is_faster(rois: Tensor, maps: Tensor, limits: tuple, geometry: Geometry) -> bool:
    """Whether to multiply by a sparse matrix; torchvision's operator runs otherwise."""
    min_numel, max_cells_per_bin = limits
    batch, channels, height, width = maps.shape
    num_cells = batch * height * width
    num_bins = len(rois) * geometry.aligned_height * geometry.aligned_width
    is_large = channels * min(num_cells, num_bins) >= min_numel
    if maps.device.type != "cpu" or not is_large or num_cells > num_bins * max_cells_per_bin:
        return False
    # A RoI many times as large as the map, or infinite, has too many samples to hold them all.
    samples = Bins.of(rois, geometry).samples
    return bool((samples <= samples.new_tensor([height, width])).all())


def _product(matrix: csr_matrix, dense: Tensor) -> Tensor:
    """Multiply a SciPy CSR matrix and a dense one: a bag of weighted rows per row of the first."""
    columns, ends, weights = map(torch.from_numpy, (matrix.indices, matrix.indptr, matrix.data))
    return embedding_bag(
        columns, dense, ends, per_sample_weights=weights, mode="sum", include_last_offset=True
    )


def _matrix(rois: Tensor, maps: Tensor, geometry: Geometry) -> csr_matrix:
    """Return the averages of the bins as a SciPy CSR matrix (K * PH * PW, B * H * W)."""
    bins = Bins.of(rois, geometry)
    batch, _, height, width = maps.shape
    rows, columns = geometry.aligned_height, geometry.aligned_width
    # NumPy, because sharing index arithmetic of this size between threads costs more than it saves.
    roi, row, column = np.indices((len(rois), rows, columns)).reshape(3, -1)  # of each bin
    along_y = _axis_weights(bins, 0, rows, height)[roi * rows + row]  # (K * PH * PW, H)
    # The cells of a bin form lines along x: L in all bins, one for each element of along_y.
    bin_of_line = np.repeat(np.arange(len(roi)), np.diff(along_y.indptr))  # (L,)
    x_bin_of_line = (roi * columns + column)[bin_of_line]
    lines = _axis_weights(bins, 1, columns, width)[x_bin_of_line]  # (L, W)
    image = rois[:, 0].long().numpy()[roi[bin_of_line]]  # (L,)
    first_cell = (image * height + along_y.indices) * width  # (L,)
    cells_per_line = np.diff(lines.indptr)  # (L,)
    weights = lines.data * np.repeat(along_y.data, cells_per_line)
    cells = lines.indices + np.repeat(first_cell, cells_per_line)
    ends = lines.indptr[along_y.indptr]  # of the bins' cells: (K * PH * PW + 1,)
    return csr_matrix((weights, cells, ends), (len(roi), batch * height * width))


def _axis_weights(bins: Bins, axis: int, count: int, size: int) -> csr_matrix:
    """Return what `count` bins a RoI take along an axis of `size` cells: CSR (K * count, size)."""
    start, bin_size, samples = (each[:, axis, None, None] for each in bins)  # (K, 1, 1)
    index = torch.arange(max(int(samples.max()), 1))[:, None]
    divisor = samples.clamp(min=1)
    # in the order of torchvision and mmcv, so that coordinates round as theirs do
    position = start + torch.arange(count) * bin_size + (index + 0.5) * bin_size / divisor
    share = (index < samples) / divisor  # (K, samples, 1)
    share = share * ((position >= -1) & (position <= size))  # (K, samples, P)
    position = position.clamp(0, size - 1)
    low = position.floor()
    fraction = position - low
    cell = torch.stack([low, (low + 1).clamp(max=size - 1)]).long()  # (2, K, samples, P)
    weight = torch.stack([(1 - fraction) * share, fraction * share])
    num_bins = len(start) * count
    bin_index = torch.arange(num_bins).view(-1, 1, count).expand_as(cell)
    weight, bin_index, cell = (each.flatten().numpy() for each in (weight, bin_index, cell))
    matrix = csr_matrix((weight, (bin_index, cell)), (num_bins, size))  # sums weights of a cell
    matrix.eliminate_zeros()
    return matrix
