"""The passes over feature maps of fused layer attention in plain PyTorch.

One depthwise convolution over B * C channels, with weights of each sample, does gate, value, norm
and residual; the history is one more operation. Channels-last maps are copied for it and back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mrla_mm.ops.coefficients import value_weights
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.reference import at_least_float32, dtype_of_sums, global_average

# In half precision a residual of 1 in a convolution's weight would swallow a small weight.
FULL_PRECISION = (torch.float32, torch.float64)


class TorchPasses(Passes):
    """Passes for every device and dtype; `Passes` has what each method does."""

    def add_relu(self, c, shortcut, *, out, pool) -> Tensor | None:
        """Return averages in one part, in at least single precision."""
        if shortcut is not None:
            torch.add(c, shortcut, out=out).relu_()
        return global_average(out).unsqueeze(0) if pool else None

    def convolve(
        self, x, weight, *, gain=None, slope=None, offset=None, history=None, residual=False, out
    ) -> None:
        """Run one convolution, whose kernel holds gain and, in full precision, the residual."""
        residual_in_kernel = residual and x.dtype in FULL_PRECISION
        kernel = sample_kernels(x, weight, gain, residual_in_kernel)
        y = depthwise(x, kernel, offset)
        if history is not None and slope is not None:
            torch.addcmul(y, history, on_grid(slope, x), out=out)
        elif history is not None:
            torch.add(y, history, out=out)
        else:
            out.copy_(y)
        if residual and not residual_in_kernel:
            out.add_(x)

    def convolve_backward(
        self, grad, weight, *, gain=None, slope=None, grad_pixel, extra_grad=None,
        residual=False, relu_output=None, grad_x, grad_history=None,
    ) -> None:  # fmt: skip
        """Run the convolution with the kernel turned round."""
        flipped = None if weight is None else weight.flip((2, 3))
        options = dict(gain=gain, offset=grad_pixel.finish(), history=extra_grad, residual=residual)
        self.convolve(grad, flipped, **options, out=grad_x)
        if relu_output is not None:
            torch.ops.aten.threshold_backward.grad_input(grad_x, relu_output, 0, grad_input=grad_x)
        if grad_history is None:
            return
        slope = grad.new_ones(1) if slope is None else on_grid(slope, grad)
        if relu_output is None:
            torch.mul(grad, slope, out=grad_history)
        else:
            torch.addcmul(grad_x, grad, slope, out=grad_history)

    def grid_sums(self, grad, x, *, history=None, convolved, sum_grad) -> Tensor:
        """Return sums in one part; where it can, by the convolution's own backward pass."""
        dtype = dtype_of_sums(x)
        grad_sums = None
        if convolved:
            groups = x.shape[0] * x.shape[1]
            stacked = (1, groups, *x.shape[2:])
            kernel = x.new_empty(groups, 1, 3, 3)  # only its shape matters
            with_bias = sum_grad and x.dtype in FULL_PRECISION
            _, tap_sums, grad_sums = torch.ops.aten.convolution_backward(
                grad.reshape(stacked), x.reshape(stacked), kernel,
                bias_sizes=[groups], stride=(1, 1), padding=(1, 1), dilation=(1, 1),
                transposed=False, output_padding=(0, 0), groups=groups,
                output_mask=(False, True, with_bias),
            )  # fmt: skip
            tap_sums = tap_sums.to(dtype).view(*x.shape[:2], 9)
        else:
            tap_sums = grid_sum(at_least_float32(grad) * x).unsqueeze(-1)
        sums = tap_sums.new_zeros(1, x.shape[0], tap_sums.shape[2] + 2, x.shape[1])
        sums[0, :, :-2] = tap_sums.mT
        if history is not None:
            sums[0, :, -2] = grid_sum(grad.to(dtype) * history)
        if sum_grad:
            sums[0, :, -1] = grid_sum(grad) if grad_sums is None else grad_sums.view(x.shape[:2])
        return sums

    def weighted_sum(self, values, scores, *, gain=None, offset=None, x=None, out) -> None:
        """Add one value after the other to out."""
        weights = value_weights(scores, gain, out.shape[1])  # (B, T, C)
        weights = [on_grid(weight, out) for weight in weights.unbind(1)]
        starts_with_x = x is not None and out.dtype in FULL_PRECISION
        if starts_with_x:
            torch.addcmul(x, values[0], weights[0], out=out)
        else:
            torch.mul(values[0], weights[0], out=out)
        for value, weight in zip(values[1:], weights[1:], strict=True):
            out.addcmul_(value, weight)
        if offset is not None:
            out.add_(on_grid(offset, out))
        if x is not None and not starts_with_x:
            out.add_(x)

    def weighted_sum_backward(
        self, grad, values, scores, *, gain=None, grad_values, sum_grad
    ) -> Tensor:
        """Return sums in one part."""
        batch, channels = grad.shape[:2]
        sums = scores.new_zeros(1, batch, len(values) + 1, channels)
        products = torch.empty_like(grad)
        weights = value_weights(scores, gain, channels)  # (B, T, C)
        for index, value in enumerate(values):
            sums[0, :, index] = grid_sum(torch.mul(grad, value, out=products))
            grad_values[index].addcmul_(grad, on_grid(weights[:, index], grad))
        if sum_grad:
            sums[0, :, -1] = grid_sum(grad)
        return sums


def grid_sum(x: Tensor) -> Tensor:
    """Sum over the grid in at least single precision: (B, C, H, W) -> (B, C)."""
    return x.sum(dim=(2, 3), dtype=dtype_of_sums(x))


def on_grid(per_channel: Tensor, x: Tensor) -> Tensor:
    """Values per channel that multiply a map in its precision: (B, C) -> (B, C, 1, 1)."""
    return per_channel.to(x.dtype)[:, :, None, None]


def sample_kernels(x: Tensor, weight: Tensor | None, gain: Tensor | None, residual: bool) -> Tensor:
    """Kernel [1 +] gain weight of each sample, (B, C, 9); (B, C, 1) without a weight."""
    kernel = x.new_ones(1, 1) if weight is None else weight.flatten(1)
    kernel = at_least_float32(kernel).expand(*x.shape[:2], -1)
    if gain is not None:
        kernel = gain.unsqueeze(-1) * kernel
    elif residual:
        kernel = kernel.clone()
    if residual:
        kernel[..., kernel.shape[-1] // 2].add_(1)
    return kernel


def depthwise(x: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
    """Depthwise 3x3 convolution (or product) in which each sample has its own weights.

    Shapes: x (b, c, H, W), weight (b, c, 9 or 1), offset (b, c) or None -> (b, c, H, W).
    """
    batch, channels = x.shape[:2]
    if offset is not None:
        offset = offset.to(x.dtype).reshape(-1)
    if weight.shape[-1] == 1:
        out = x * on_grid(weight[..., 0], x)
        return out if offset is None else out.add_(offset.view(batch, channels, 1, 1))
    weight = weight.to(x.dtype).reshape(batch * channels, 1, 3, 3)
    stacked = x.reshape(1, batch * channels, *x.shape[2:])
    return F.conv2d(stacked, weight, offset, padding=1, groups=batch * channels).view(x.shape)
