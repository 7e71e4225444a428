"""How the Triton kernels are launched, and what their grids share."""

import torch
from torch import Tensor

PROGRAMS = 2048  # enough to fill a GPU, where a map is large enough


def launch(kernel, grid: tuple[int, ...], first: Tensor, *rest: object, **constants: object) -> None:
    """Launch a kernel on the GPU that its first tensor is on, whichever one is current."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *rest, **constants)


def sum_spans(partial: Tensor) -> Tensor:
    """Sum what the programs of each span of the grid found, always in the same order."""
    return partial[0] if len(partial) == 1 else partial.sum(0)


def sample_stride(per_channel: Tensor | None) -> int:
    """Distance between samples of (B or 1, C), 0 where all samples share the values."""
    return per_channel.shape[1] if per_channel is not None and per_channel.shape[0] > 1 else 0
