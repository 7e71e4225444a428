"""RoIAlign's average: a sparse product on a CPU, torchvision's operator elsewhere.

The average is linear in the map: a sparse (K * PH * PW, B * H * W) matrix times the map as (B * H *
W, C). Its backward is the product with the transpose, where torchvision's is one scalar thread. The
samples of a bin form a grid and bilinear weights are separable, so that a row of the matrix is the
outer product of a few weights per axis.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mrla_mm.compat.ext_ops.common import torchvision_ops
from mrla_mm.compat.ext_ops.roi_bins import Bins, neighbours

# A sparse product is faster where map and output have at least so many elements, and the map so
# many cells per bin at most.
FORWARD, BACKWARD = (2**18, 5), (2**15, 40)


def average(maps: Tensor, rois: Tensor, output: Tensor, *geometry) -> None:
    """Average ``maps`` into ``output``; geometry: spatial scale, sampling ratio, aligned."""
    if bins := _sparse_bins(maps, rois, output, *FORWARD, *geometry):
        cells = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]).to(rois.dtype)
        pooled = _product(_matrix(bins, maps.shape), cells)  # (K * PH * PW, C)
        pooled = pooled.view(len(rois), *bins.shape, -1).permute(0, 3, 1, 2)
    else:
        torchvision_ops()
        scale, *options = geometry
        pooled = torch.ops.torchvision.roi_align(
            maps.to(rois.dtype), rois, scale, *output.shape[2:], *options
        )
    output.copy_(pooled)


def average_backward(grad_output: Tensor, rois: Tensor, grad_maps: Tensor, *geometry) -> None:
    """Write the gradient of :func:`average` into ``grad_maps``."""
    if bins := _sparse_bins(grad_maps, rois, grad_output, *BACKWARD, *geometry):
        grad = grad_output.permute(0, 2, 3, 1).reshape(-1, grad_output.shape[1]).to(rois.dtype)
        grad = _product(_matrix(bins, grad_maps.shape).T.tocsr(), grad)
        images = grad.view(len(grad_maps), -1, grad.shape[1])
        for image, cells in zip(grad_maps.flatten(2), images, strict=True):
            image.copy_(cells.T)  # five times as fast as one permuted copy
    else:
        torchvision_ops()
        size, (scale, *options) = (*grad_output.shape[2:], *grad_maps.shape), geometry
        grad_output = grad_output.to(rois.dtype)
        grad_maps.copy_(
            torch.ops.torchvision._roi_align_backward(grad_output, rois, scale, *size, *options)
        )


def _sparse_bins(
    maps: Tensor, rois: Tensor, output: Tensor, min_numel: int, cells_per_bin: int, *geometry
):
    """Return the bins for a sparse product, or None where torchvision's operator is to run."""
    shape, (batch, _, height, width) = output.shape[2:], maps.shape
    small = min(maps.numel(), output.numel()) < min_numel
    few_bins = len(rois) * shape.numel() * cells_per_bin < batch * height * width
    if maps.device.type != "cpu" or small or few_bins:
        return None
    bins = Bins.of(rois, shape, *geometry)
    # A RoI many times as large as the map, or infinite, has too many samples to hold them all.
    return bins if bool(((bins.grid_h <= height) & (bins.grid_w <= width)).all()) else None


def _product(matrix, dense: Tensor) -> Tensor:
    """Multiply a SciPy CSR matrix and a dense one: a bag of weighted rows per row of the first."""
    columns, ends, weights = map(torch.from_numpy, (matrix.indices, matrix.indptr, matrix.data))
    return embedding_bag(
        columns, dense, ends, per_sample_weights=weights, mode="sum", include_last_offset=True
    )


def _matrix(bins: Bins, maps_shape: torch.Size):
    """Return the averages of the bins as a SciPy CSR matrix (K * PH * PW, B * H * W)."""
    from scipy.sparse import csr_matrix  # mmdet requires and imports it

    batch, _, height, width = maps_shape
    y, weight_y, ranges_y = _axis_weights(bins.sample_y, bins.grid_h, height)
    x, weight_x, ranges_x = _axis_weights(bins.sample_x, bins.grid_w, width)
    # NumPy, because sharing index arithmetic of this size between threads costs more than it saves.
    shape = (2, len(bins.image), *bins.shape)
    start_y, count_y = np.broadcast_to(ranges_y[:, :, :, None], shape).reshape(2, -1)
    start_x, count_x = np.broadcast_to(ranges_x[:, :, None, :], shape).reshape(2, -1)
    row, at_y = _concatenate_ranges(start_y, count_y)  # one element per line of cells in a bin
    line, at_x = _concatenate_ranges(start_x[row], count_x[row])  # one per cell
    first = (bins.image.numpy()[row // bins.shape.numel()] * height + y[at_y]) * width
    ends = np.concatenate([[0], np.cumsum(count_y * count_x)])
    weight, column = weight_y[at_y][line] * weight_x[at_x], first[line] + x[at_x]
    return csr_matrix((weight, column, ends), (len(ends) - 1, batch * height * width))


def _axis_weights(sample, grid: Tensor, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cells and weights of all bins along one axis, and each bin's range of them.

    A range is a bin's first cell and their number, (2, K, P).
    """
    from scipy.sparse import csr_matrix

    index, grid = torch.arange(max(int(grid.max()), 1))[:, None], grid[:, None, None]
    near = neighbours(sample(index.expand(len(grid), -1, 1)), size)
    share = (index < grid) / grid.clamp(min=1)  # (K, samples, 1)
    cell = torch.stack([cell for cell, _ in near])  # (2, K, samples, P)
    weight = torch.stack([weight * share for _, weight in near])
    row = torch.arange(len(grid) * cell.shape[3]).view(-1, 1, cell.shape[3]).expand_as(cell)
    weight, row, cell = (t.flatten().numpy() for t in (weight, row, cell))
    matrix = csr_matrix((weight, (row, cell)), (row[-1] + 1, size))  # sums the weights of a cell
    matrix.eliminate_zeros()
    ranges = np.stack([matrix.indptr[:-1], np.diff(matrix.indptr)]).reshape(2, len(grid), -1)
    return matrix.indices, matrix.data, ranges


def _concatenate_ranges(start: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate ranges of ``count`` numbers from ``start``; return owners and numbers."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) + (start + count - np.cumsum(count))[owner]
