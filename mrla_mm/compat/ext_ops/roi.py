"""RoIAlign (He et al., ICCV 2017) with mmcv's signature, and its maximum."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mrla_mm.compat.ext_ops.common import compute_dtype
from mrla_mm.compat.ext_ops.roi_average import average, average_backward
from mrla_mm.compat.ext_ops.roi_bins import Bins, neighbours

MAX, AVG = range(2)  # mmcv's numbering
CHUNK = 1 << 23  # output elements that the maximum computes at a time, which bounds its memory


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Pool the ``rois`` (K, 5) of ``input`` (B, C, H, W) into ``output`` (K, C, PH, PW).

    ``argmax_y`` and ``argmax_x`` (the shape of ``output``; used by the maximum only) receive the
    row and column of the winning sample in its bin's grid, and the row -1 in a bin without samples,
    whose output is 0. mmcv stores coordinates there, which half precision would round; only
    :func:`roi_align_backward` reads them.
    """
    dtype = compute_dtype(input)
    rois, geometry = rois.to(dtype), (spatial_scale, sampling_ratio, aligned)
    if pool_mode == AVG:
        average(input, rois, output, *geometry)
        return
    # (B, H, W, C): a cell's channels are fetched together
    cells = input.permute(0, 2, 3, 1).to(dtype).contiguous()
    for part in _chunks(output):
        bins = Bins.of(rois[part], output.shape[2:], *geometry)
        best, best_y, best_x = _max_samples(cells, bins)
        output[part] = best.permute(0, 3, 1, 2)
        argmax_y[part] = best_y.permute(0, 3, 1, 2)
        argmax_x[part] = best_x.permute(0, 3, 1, 2)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write the gradient of :func:`roi_align_forward` into ``grad_input`` (B, C, H, W)."""
    dtype = compute_dtype(grad_input)
    rois, geometry = rois.to(dtype), (spatial_scale, sampling_ratio, aligned)
    if pool_mode == AVG:
        average_backward(grad_output, rois, grad_input, *geometry)
        return
    channels, height, width = grad_input.shape[1:]
    grad = torch.zeros(grad_input.shape, dtype=dtype, device=grad_input.device)
    for part in _chunks(grad_output):
        bins = Bins.of(rois[part], grad_output.shape[2:], *geometry)
        grad_part, row, column = (
            grad_output[part].to(dtype),
            argmax_y[part],
            argmax_x[part],
        )  # (K, C, PH, PW)
        y = bins.sample_y(row.permute(0, 1, 3, 2)).permute(
            0, 1, 3, 2
        )  # the bin's row is the last axis in sample_y
        x = bins.sample_x(column)
        plane = bins.image.view(-1, 1, 1, 1) * channels + torch.arange(
            channels, device=rois.device
        ).view(-1, 1, 1)
        for cell_y, weight_y in neighbours(y, height):
            for cell_x, weight_x in neighbours(x, width):
                index = (plane * height + cell_y) * width + cell_x
                value = grad_part * weight_y * weight_x * (row >= 0)
                grad.view(-1).index_add_(0, index.flatten(), value.flatten())
    grad_input.copy_(grad)


def _max_samples(cells: Tensor, bins: Bins) -> tuple[Tensor, Tensor, Tensor]:
    """Return each bin's largest sample and its row and column in the grid, (K, PH, PW, C)."""
    best = cells.new_full((len(bins.image), *bins.shape, cells.shape[3]), -torch.inf)
    winner = torch.full_like(best, -1, dtype=torch.int32)
    rows, columns = int(bins.grid_h.max()), max(int(bins.grid_w.max()), 1)
    for number in range(rows * columns):
        row, column = divmod(number, columns)
        active = ((bins.grid_h > row) & (bins.grid_w > column)).nonzero().squeeze(1)
        if len(active) == 0:
            continue
        some = bins.select(active)
        y = some.sample_y(some.image.new_full((len(active), 1), row))  # (k, PH)
        x = some.sample_x(some.image.new_full((len(active), 1), column))  # (k, PW)
        value, so_far = _bilinear(cells, some.image, y, x), best[active]
        better = value > so_far
        best[active] = torch.where(better, value, so_far)
        winner[active] = torch.where(better, number, winner[active])
    empty = winner < 0
    return (
        best.masked_fill_(empty, 0),
        (winner // columns).masked_fill_(empty, -1),
        winner.remainder(columns),
    )


def _bilinear(cells: Tensor, image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the map at the grid of ``y`` (k, PH) and ``x`` (k, PW): (k, PH, PW, C)."""
    height, width, channels = cells.shape[1:]
    cell_y, weight_y = map(torch.stack, zip(*neighbours(y, height), strict=True))  # (2, k, PH)
    cell_x, weight_x = map(torch.stack, zip(*neighbours(x, width), strict=True))  # (2, k, PW)
    line = image.view(-1, 1) * height + cell_y
    index = line[:, None, :, :, None] * width + cell_x[None, :, :, None, :]  # (2, 2, k, PH, PW)
    weight = weight_y[:, None, :, :, None] * weight_x[None, :, :, None, :]
    # A weighted sum of four table rows: one pass, where arithmetic on the corners would take a
    # dozen.
    value = embedding_bag(
        index.view(4, -1).T.contiguous(),
        cells.view(-1, channels),
        per_sample_weights=weight.view(4, -1).T.contiguous(),
        mode="sum",
    )
    return value.view(*index.shape[2:], channels)


def _chunks(output: Tensor):
    """Return slices of the RoIs of ``output`` (K, C, PH, PW), each of about CHUNK elements."""
    step = max(1, CHUNK // max(1, output[0].numel())) if len(output) else 1
    return (slice(start, start + step) for start in range(0, len(output), step))
