"""The passes as loops that numba compiles, for float32 maps on CPUs; `loops` has the loops."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mrla_mm.ops.coefficients import value_weights
from mrla_mm.ops.loops import PIECES, SUMS, channels_last, contiguous, count_threads, share
from mrla_mm.ops.torch_passes import TorchPasses, grid_sum, sample_kernels

Maps = Tensor | Sequence[Tensor] | None  # (B, C, H, W) each


class Layout(NamedTuple):
    """How the loops see maps of one size and layout.

    The number of bands depends on that of the threads alone, so sums are the same to the bit in
    every run.
    """

    size: torch.Size  # (B, C, H, W)
    channels_last: bool  # else contiguous
    bands: int  # parts of a channels-last map that are summed on their own

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        """The layout of a map and those like it."""
        channels_last = not x.is_contiguous()
        threads = count_threads(x.numel())
        bands = 1
        if channels_last and threads > 1:
            bands = min(math.ceil(threads * PIECES / x.shape[0]), x.shape[2])
        return cls(x.shape, channels_last, bands)

    def run(self, loop: str, maps: Sequence[Maps], *args: object) -> None:
        """Run a loop by its name on all threads; maps and args are in the order of its parameters.

        It gets addresses of maps, whose memory is held here until the loop has ended.
        """
        batch, channels, height, width = self.size
        pixels = height * width
        module = channels_last if self.channels_last else contiguous
        units = batch * (self.bands if self.channels_last else channels)
        shape = (batch, pixels, channels) if self.channels_last else (batch * channels, pixels)
        grid = height, width, self.bands
        addresses = map(self.address, maps)
        share(getattr(module, loop), units, self.size.numel(), grid, shape, *addresses, *args)

    def address(self, maps: Maps) -> int | np.ndarray:
        """Where a map begins, 0 for None; of a sequence of maps an array.

        Raises ValueError for a map of another size, layout, dtype or device: loops cannot tell.
        """
        if maps is None:
            return 0
        if not isinstance(maps, Tensor):
            return np.array([self.address(each) for each in maps])
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        is_dense = maps.is_cpu and maps.is_contiguous(memory_format=layout)
        if not is_dense or maps.shape != self.size or maps.dtype != torch.float32:
            raise ValueError(f"expected a float32 map {self.size} on a CPU, dense in {layout}")
        return maps.data_ptr()

    def coefficients(self, tensor: Tensor) -> np.ndarray:
        """Coefficients (B, C, K): (B * C, K) for contiguous maps, else (B, K, C)."""
        tensor = tensor.detach().float()
        tensor = tensor.transpose(1, 2) if self.channels_last else tensor.flatten(0, 1)
        return tensor.contiguous().numpy()

    def per_channel(self, tensor: Tensor | None, default: float) -> np.ndarray:
        """One coefficient (B, C), or a default: (B * C,) for contiguous maps, else (B, C)."""
        if tensor is None:
            tensor = torch.full(self.size[:2], default, device="cpu")
        return self.coefficients(tensor.unsqueeze(2))[:, 0]

    def new_sums(self, count: int) -> np.ndarray:
        """Zeros that a loop adds its sums to."""
        batch, channels = self.size[:2]
        if self.channels_last:
            return np.zeros((batch * self.bands, count, channels), np.float32)
        return np.zeros((batch * channels, count), np.float32)

    def collect(self, sums: np.ndarray) -> Tensor:
        """What a loop added up, as a tensor (S, B, K, C) of a part for each band."""
        batch, channels = self.size[:2]
        sums = torch.from_numpy(sums)
        if self.channels_last:
            return sums.unflatten(0, (batch, self.bands)).transpose(0, 1)
        return sums.unflatten(0, (1, batch, channels)).mT


class NumbaPasses(TorchPasses):
    """Passes for float32 maps on CPUs, each of which writes every map once."""

    def compile_key(self, shape: torch.Size, heads: int, channels_last: bool) -> Hashable:
        """Loops are compiled once; what they do differs with what is small, in blocks or groups.

        Up to 4 rows and 8 columns each size is a case of its own: all pixels are near an edge, and
        loops are shorter than a vector.
        """
        batch, _, height, width = shape
        in_blocks = height * width > contiguous.BLOCK
        in_groups = not channels_last and shape.numel() > contiguous.GROUP
        return min(batch, 2), min(heads, 2), min(height, 5), min(width, 9), in_blocks, in_groups

    def add_relu(self, c, shortcut, *, out, pool) -> Tensor | None:
        """Sum the map while it is written."""
        if shortcut is None:
            return super().add_relu(c, shortcut, out=out, pool=pool)
        layout = Layout.of(out)
        sums = layout.new_sums(1)
        layout.run("add_relu", (c, shortcut, out), sums)
        return layout.collect(sums)[:, :, 0] / out[0, 0].numel() if pool else None

    def convolve(
        self, x, weight, *, gain=None, slope=None, offset=None, history=None, residual=False,
        relu_output=None, out, grad_history=None,
    ) -> None:  # fmt: skip
        """Run one loop, whose kernel holds gain and residual; its gradients take the same."""
        layout = Layout.of(x)
        kernels = layout.coefficients(sample_kernels(x, weight, gain, residual))
        offset = layout.per_channel(offset, 0)
        slope = layout.per_channel(slope, 1)
        maps = x, history, relu_output, out, grad_history
        layout.run("convolve", maps, kernels, offset, slope)

    def convolve_backward(
        self, grad, weight, *, gain=None, slope=None, grad_pixel, extra_grad=None,
        residual=False, relu_output=None, grad_x, grad_history=None,
    ) -> None:  # fmt: skip
        """Run the loop of `convolve` with the kernel turned round."""
        flipped = None if weight is None else weight.flip((2, 3))
        self.convolve(
            grad, flipped, gain=gain, slope=slope, offset=grad_pixel.finish(), history=extra_grad,
            residual=residual, relu_output=relu_output, out=grad_x, grad_history=grad_history,
        )  # fmt: skip

    def grid_sums(self, grad, x, *, history=None, convolved, sum_grad) -> Tensor:
        """Sum everything in one loop."""
        if not convolved:
            return super().grid_sums(grad, x, history=history, convolved=False, sum_grad=sum_grad)
        layout = Layout.of(x)
        sums = layout.new_sums(SUMS)
        layout.run("grid_sums", (grad, x, history), sums)
        return layout.collect(sums)

    def weighted_sum(self, values, scores, *, gain=None, offset=None, x=None, out) -> None:
        """Read all values in one loop."""
        layout = Layout.of(out)
        weights = layout.coefficients(value_weights(scores, gain, out.shape[1]).mT)
        offset = layout.per_channel(offset, 0)
        layout.run("weighted_sum", (x, values, out), weights, offset)

    def weighted_sum_backward(
        self, grad, values, scores, *, gain=None, grad_values, sum_grad
    ) -> Tensor:
        """Read and write all values in one loop."""
        layout = Layout.of(grad)
        weights = layout.coefficients(value_weights(scores, gain, grad.shape[1]).mT)
        sums = layout.new_sums(len(values) + 1)
        layout.run("weighted_sum_backward", (grad, values, grad_values), weights, sums)
        sums = layout.collect(sums)
        if sum_grad:
            sums[0, :, -1] = grid_sum(grad)
        return sums
