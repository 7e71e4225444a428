"""RoIAlign (He et al., ICCV 2017) with mmcv's signature: the average or the maximum of each bin."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype
from mrla_mm.compat.ext_ops.roi_average import (
    Bins,
    Geometry,
    average,
    average_backward,
    roi_align,
    roi_align_gradient,
)

MAX, AVG = range(2)  # mmcv's numbering
CHUNK = 1 << 23  # samples that the maximum computes at a time, which bounds its memory


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    pool_mode: int,
    **options,
) -> None:
    """Pool the ``rois`` (K, 5) of ``input`` (B, C, H, W) into ``output`` (K, C, PH, PW).

    ``argmax_y`` and ``argmax_x`` (the shape of ``output``; used by the maximum only) receive the
    row and column of the winning sample in its bin's grid. mmcv stores coordinates there, which
    half precision would round; only :func:`roi_align_backward` reads them.
    """
    dtype = compute_dtype(input)
    rois = rois.to(dtype)
    geometry = Geometry(**options)
    if pool_mode == AVG:
        average(input, rois, output, geometry)
        return
    maps = input.to(dtype)
    for part, fine, (rows, columns) in _equal_grids(rois, output, geometry):
        samples = roi_align(maps, rois[part], fine).unflatten(3, (-1, columns))
        samples = samples.unflatten(2, (-1, rows)).transpose(3, 4).flatten(4)
        best, winner = samples.max(4)  # (k, C, PH, PW)
        output[part] = best.to(output.dtype)
        argmax_y[part] = (winner // columns).to(argmax_y.dtype)
        argmax_x[part] = (winner % columns).to(argmax_x.dtype)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    pool_mode: int,
    **options,
) -> None:
    """Write the gradient of :func:`roi_align_forward` into ``grad_input`` (B, C, H, W)."""
    dtype = compute_dtype(grad_input)
    rois = rois.to(dtype)
    geometry = Geometry(**options)
    if pool_mode == AVG:
        average_backward(grad_output, rois, grad_input, geometry)
        return
    grad = torch.zeros_like(grad_input, dtype=dtype)
    for part, fine, (rows, columns) in _equal_grids(rois, grad_output, geometry):
        winner = argmax_y[part].long() * columns + argmax_x[part].long()
        samples = grad.new_zeros(*winner.shape, rows * columns)
        samples.scatter_(4, winner[..., None], grad_output[part].to(dtype)[..., None])
        samples = samples.unflatten(4, (rows, columns)).transpose(3, 4)
        samples = samples.flatten(4).flatten(2, 3)  # (k, C, PH * rows, PW * columns)
        grad += roi_align_gradient(samples, rois[part], grad.shape, fine)
    grad_input.copy_(grad)


def _equal_grids(rois: Tensor, output: Tensor, geometry: Geometry) -> Iterator[tuple]:
    """Yield indices of RoIs with the same grid of samples in a bin, and its rows and columns.

    Between them is the geometry in which each sample is a bin. A bin without samples remains 0.
    """
    grids = Bins.of(rois, geometry).samples.int()  # (K, 2)
    for rows, columns in grids.unique(dim=0).clamp(min=0).tolist():
        size = dict(
            aligned_height=rows * geometry.aligned_height,
            aligned_width=columns * geometry.aligned_width,
        )
        samples = rows * columns * output[0].numel()
        if samples:
            same = (grids == grids.new_tensor([rows, columns])).all(1)
            for part in same.nonzero().squeeze(1).split(max(1, CHUNK // samples)):
                yield part, geometry._replace(**size, sampling_ratio=1), (rows, columns)
