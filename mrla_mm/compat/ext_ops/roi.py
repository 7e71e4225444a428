"""RoIAlign (He et al., ICCV 2017): average through torchvision, maximum in PyTorch."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mrla_mm.compat.ext_ops.common import compute_dtype, torchvision_ops

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
    """Pool each RoI into ``output`` (K, C, aligned_height, aligned_width).

    ``argmax_y`` and ``argmax_x`` (the shape of ``output``; used by the maximum only) receive the row and column of the
    winning sample in its bin's grid, and the row -1 in a bin without samples, whose output is 0. mmcv stores
    coordinates there, which half precision would round; only :func:`roi_align_backward` reads them.

    Args:
        input: (B, C, H, W).
        rois: (K, 5) as image index, x1, y1, x2, y2 in image coordinates.
        output: written.
        argmax_y: written by the maximum.
        argmax_x: written by the maximum.
        aligned_height: bins per column.
        aligned_width: bins per row.
        spatial_scale: from image to map coordinates.
        sampling_ratio: samples per bin and axis; 0 takes one per map cell.
        pool_mode: 0 maximum, 1 average.
        aligned: subtract half a pixel after scaling; otherwise RoIs are at least 1 x 1.
    """
    dtype = compute_dtype(input)
    if pool_mode == AVG:
        torchvision_ops()
        pooled = torch.ops.torchvision.roi_align(
            input.to(dtype), rois.to(dtype), spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned
        )
        output.copy_(pooled)
        return
    cells = input.permute(0, 2, 3, 1).to(dtype).contiguous()  # (B, H, W, C): a cell's channels are fetched together
    for part in _chunks(output):
        bins = _Bins.of(rois[part].to(dtype), output.shape[2:], spatial_scale, sampling_ratio, aligned)
        best, best_y, best_x = _max_samples(cells, bins)
        output[part], argmax_y[part], argmax_x[part] = (t.permute(0, 3, 1, 2) for t in (best, best_y, best_x))


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
    if pool_mode == AVG:
        torchvision_ops()
        size = (aligned_height, aligned_width, *grad_input.shape)
        grad = torch.ops.torchvision._roi_align_backward(
            grad_output.to(dtype), rois.to(dtype), spatial_scale, *size, sampling_ratio, aligned
        )
        grad_input.copy_(grad)
        return
    channels, height, width = grad_input.shape[1:]
    grad = torch.zeros(grad_input.shape, dtype=dtype, device=grad_input.device)
    for part in _chunks(grad_output):
        bins = _Bins.of(rois[part].to(dtype), grad_output.shape[2:], spatial_scale, sampling_ratio, aligned)
        grad_part, row, column = grad_output[part].to(dtype), argmax_y[part], argmax_x[part]  # (K, C, PH, PW)
        y = bins.sample_y(row.permute(0, 1, 3, 2)).permute(0, 1, 3, 2)  # the bin's row is the last axis in sample_y
        x = bins.sample_x(column)
        plane = bins.image.view(-1, 1, 1, 1) * channels + torch.arange(channels, device=rois.device).view(-1, 1, 1)
        for cell_y, weight_y in _neighbours(y, height):
            for cell_x, weight_x in _neighbours(x, width):
                index = (plane * height + cell_y) * width + cell_x
                value = grad_part * weight_y * weight_x * (row >= 0)
                grad.view(-1).index_add_(0, index.flatten(), value.flatten())
    grad_input.copy_(grad)


@dataclass(frozen=True)
class _Bins:
    """Positions of the bins and samples of K RoIs on the map."""

    image: Tensor  # (K,) index into the batch
    top: Tensor  # (K,) map coordinates, as left, bin_h and bin_w
    left: Tensor
    bin_h: Tensor
    bin_w: Tensor
    grid_h: Tensor  # (K,) samples per bin, as grid_w
    grid_w: Tensor
    shape: tuple[int, int]  # bins per column and per row

    @classmethod
    def of(cls, rois: Tensor, shape: tuple[int, int], spatial_scale: float, sampling_ratio: int, aligned: bool):
        left, top, right, bottom = (rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)).unbind(1)
        height, width = bottom - top, right - left
        if not aligned:
            height, width = height.clamp(min=1), width.clamp(min=1)
        bin_h, bin_w = height / shape[0], width / shape[1]
        if sampling_ratio > 0:
            grid_h = grid_w = torch.full_like(bin_h, sampling_ratio)
        else:
            grid_h, grid_w = bin_h.ceil(), bin_w.ceil()
        return cls(rois[:, 0].long(), top, left, bin_h, bin_w, grid_h, grid_w, tuple(shape))

    def select(self, index: Tensor) -> "_Bins":
        """Return the bins of some of the RoIs."""
        return _Bins(*(getattr(self, field.name)[index] for field in fields(self)[:-1]), self.shape)

    def sample_y(self, row: Tensor) -> Tensor:
        """Return the map coordinate of sample ``row`` of every bin row, the last axis of the result."""
        return _sample(row, self.top, self.bin_h, self.grid_h, self.shape[0])

    def sample_x(self, column: Tensor) -> Tensor:
        """Return the map coordinate of sample ``column`` of every bin column, the last axis of the result."""
        return _sample(column, self.left, self.bin_w, self.grid_w, self.shape[1])


def _sample(index: Tensor, start: Tensor, size: Tensor, grid: Tensor, bins: int) -> Tensor:
    start, size, grid = (t.view(-1, *[1] * (index.dim() - 1)) for t in (start, size, grid.clamp(min=1)))
    return start + (torch.arange(bins, device=start.device) + (index.to(start.dtype) + 0.5) / grid) * size


def _max_samples(cells: Tensor, bins: _Bins) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest sample of each bin and its row and column in the grid, each (K, PH, PW, C)."""
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
    return best.masked_fill_(empty, 0), (winner // columns).masked_fill_(empty, -1), winner.remainder(columns)


def _bilinear(cells: Tensor, image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the map at the grid of ``y`` (k, PH) and ``x`` (k, PW): (k, PH, PW, C)."""
    height, width, channels = cells.shape[1:]
    cell_y, weight_y = map(torch.stack, zip(*_neighbours(y, height), strict=True))  # (2, k, PH)
    cell_x, weight_x = map(torch.stack, zip(*_neighbours(x, width), strict=True))  # (2, k, PW)
    line = image.view(-1, 1) * height + cell_y
    index = line[:, None, :, :, None] * width + cell_x[None, :, :, None, :]  # (2, 2, k, PH, PW)
    weight = weight_y[:, None, :, :, None] * weight_x[None, :, :, None, :]
    # A weighted sum of four table rows: one pass, where arithmetic on the corners would take a dozen.
    value = embedding_bag(
        index.view(4, -1).T.contiguous(),
        cells.view(-1, channels),
        per_sample_weights=weight.view(4, -1).T.contiguous(),
        mode="sum",
    )
    return value.view(*index.shape[2:], channels)


def _neighbours(position: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the two cells around each position and their weights, zero more than one cell outside the map."""
    inside = ((position >= -1) & (position <= size)).to(position.dtype)
    position = position.clamp(0, size - 1)
    low = position.floor()
    fraction = position - low
    low = low.long()
    return (low, (1 - fraction) * inside), ((low + 1).clamp(max=size - 1), fraction * inside)


def _chunks(output: Tensor):
    """Return slices of the RoIs of ``output`` (K, C, PH, PW), each of about CHUNK elements."""
    step = max(1, CHUNK // max(1, output[0].numel())) if len(output) else 1
    return (slice(start, start + step) for start in range(0, len(output), step))
