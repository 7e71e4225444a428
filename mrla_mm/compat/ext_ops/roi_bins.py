"""Where the samples of RoIs lie on a map."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bins:
    """Positions of the bins and samples of K RoIs on the map."""

    image: Tensor  # (K,) index into the batch
    top: Tensor  # (K,) map coordinates, as left, bin_h and bin_w
    left: Tensor
    bin_h: Tensor
    bin_w: Tensor
    grid_h: Tensor  # (K,) samples per bin, as grid_w
    grid_w: Tensor
    shape: torch.Size  # bins per column and per row

    @classmethod
    def of(
        cls,
        rois: Tensor,
        shape: torch.Size,
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
    ):
        """Return ``shape`` bins for each of the ``rois`` (K, 5); see :func:`roi_align_forward`."""
        corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
        left, top, right, bottom = corners.unbind(1)
        height, width = bottom - top, right - left
        if not aligned:
            height, width = height.clamp(min=1), width.clamp(min=1)
        bin_h, bin_w = height / shape[0], width / shape[1]
        if sampling_ratio > 0:
            grid_h = grid_w = torch.full_like(bin_h, sampling_ratio)
        else:
            grid_h, grid_w = bin_h.ceil(), bin_w.ceil()
        return cls(rois[:, 0].long(), top, left, bin_h, bin_w, grid_h, grid_w, shape)

    def select(self, index: Tensor) -> "Bins":
        """Return the bins of some of the RoIs."""
        return Bins(*(getattr(self, field.name)[index] for field in fields(self)[:-1]), self.shape)

    def sample_y(self, row: Tensor) -> Tensor:
        """Return the map coordinate of sample ``row`` of every bin row, on the last axis."""
        return _sample(row, self.top, self.bin_h, self.grid_h, self.shape[0])

    def sample_x(self, column: Tensor) -> Tensor:
        """Return the map coordinate of sample ``column`` of every bin column, on the last axis."""
        return _sample(column, self.left, self.bin_w, self.grid_w, self.shape[1])


def _sample(index: Tensor, start: Tensor, size: Tensor, grid: Tensor, bins: int) -> Tensor:
    per_roi = (-1, *[1] * (index.dim() - 1))
    size = size.view(per_roi)
    # in the order of torchvision and mmcv, so that coordinates round as theirs do
    corner = start.view(per_roi) + torch.arange(bins, device=start.device) * size
    return corner + (index.to(start.dtype) + 0.5) * size / grid.clamp(min=1).view(per_roi)


def neighbours(position: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the two cells around each position and their weights, zero far outside the map."""
    inside = ((position >= -1) & (position <= size)).to(position.dtype)
    position = position.clamp(0, size - 1)
    low = position.floor()
    fraction = position - low
    low = low.long()
    return (low, (1 - fraction) * inside), ((low + 1).clamp(max=size - 1), fraction * inside)
