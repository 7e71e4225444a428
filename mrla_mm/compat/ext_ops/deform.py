"""Deformable convolution (Dai et al., ICCV 2017), also modulated (Zhu et al., CVPR 2019).

mmcv and torchvision order offsets alike: y before x, per kernel tap, per group.

Offset and mask of a modulated convolution may be of a larger grid than the output (DyHead's are).
As mmcv's kernels index the memory of each sample as if it had the output's grid, its first elements
count and the others are unused.

mmcv gives a sample exactly one row or column in front of the map no gradient, torchvision that of
the samples behind it. Convolutions with padding whose offsets start at zero have such samples.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.ops import deform_conv2d

from mrla_mm.compat.ext_ops.common import DIVERGED, compute, write_gradients
from mrla_mm.errors import InputError


def deform_conv_forward(input, weight, offset, output, *buffers, **geometry) -> None:
    """Write the convolution into ``output`` (B, C_out, H_out, W_out)."""
    output.copy_(compute(_plain_convolution(output, **geometry), input, offset, weight))


def deform_conv_backward_input(
    input, offset, grad_output, grad_input, grad_offset, weight, *buffers, **geometry
) -> None:
    """Write the gradients of input and offset."""
    convolve = _plain_convolution(grad_output, **geometry)
    grads = (grad_input, grad_offset, None)
    write_gradients(convolve, (input, offset, weight), grads, grad_output)


def deform_conv_backward_parameters(
    input, offset, grad_output, grad_weight, *buffers, **geometry
) -> None:
    """Write the gradient of the weight, which does not depend on the weight's values."""
    convolve = _plain_convolution(grad_output, **geometry)
    tensors = (input, offset, torch.zeros_like(grad_weight))
    write_gradients(convolve, tensors, (None, None, grad_weight), grad_output)


def modulated_deform_conv_forward(
    input, weight, bias, ones, offset, mask, output, columns, with_bias, **geometry
) -> None:
    """Write the convolution into ``output``; ``bias`` counts if ``with_bias``."""
    convolve = _modulated_convolution(output, **geometry)
    bias = bias if with_bias else weight.new_zeros(len(weight))
    output.copy_(compute(convolve, input, offset, weight, mask, bias))


def modulated_deform_conv_backward(
    input, weight, bias, ones, offset, mask, columns,
    grad_input, grad_weight, grad_bias, grad_offset, grad_mask, grad_output, with_bias, **geometry
) -> None:  # fmt: skip
    """Write the gradients of input, offset, weight, mask and, if ``with_bias``, bias."""
    convolve = _modulated_convolution(grad_output, **geometry)
    if not with_bias:
        bias = weight.new_zeros(len(weight))
        grad_bias = None
    grads = (grad_input, grad_offset, grad_weight, grad_mask, grad_bias)
    write_gradients(convolve, (input, offset, weight, mask, bias), grads, grad_output)


def _plain_convolution(output, *, dH, dW, padH, padW, dilationH, dilationW, **rest) -> Callable:
    return _convolution(output, (dH, dW), (padH, padW), (dilationH, dilationW))


def _modulated_convolution(
    output, *, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, **rest
) -> Callable:
    return _convolution(output, (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))


def _convolution(output: Tensor, *geometry: tuple[int, int]) -> Callable[..., Tensor]:
    """Return the convolution to the grid of ``output``, given stride, padding and dilation.

    torchvision reads kernel size and groups off the shapes.
    """
    size = output.shape[2:]

    def to_grid(tensor: Tensor) -> Tensor:
        elements = tensor.shape[1] * size.numel()
        return tensor.flatten(1)[:, :elements].unflatten(1, (-1, *size))

    def convolve(input, offset, weight, mask=None, bias=None) -> Tensor:
        if mask is not None:
            offset = to_grid(offset)
            mask = to_grid(mask)
        if offset.device.type == "cpu" and offset.isnan().any():  # would read other memory
            raise InputError(f"deformable convolution: offsets are NaN; {DIVERGED}")
        offset = without_gradient_in_front(offset, weight.shape[2:], *geometry)
        return deform_conv2d(input, offset, weight, bias, *geometry, mask=mask)

    return convolve


def without_gradient_in_front(
    offset: Tensor,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    paddings: tuple[int, int],
    dilations: tuple[int, int],
) -> Tensor:
    """Detach the offsets (B, G * KH * KW * 2, H, W) that lead to row or column -1 of the map."""
    starts = []  # of the samples, (KH, H) in rows and (KW, W) in columns
    for axis, taps in enumerate(kernel):
        output = torch.arange(offset.shape[2 + axis], device=offset.device)
        tap = torch.arange(taps, device=offset.device)[:, None]
        starts.append(output * strides[axis] - paddings[axis] + tap * dilations[axis])
    rows = starts[0][:, None, :, None]
    columns = starts[1][:, None]
    start = torch.stack(torch.broadcast_tensors(rows, columns), 2).flatten(0, 2)
    sample = offset.unflatten(1, (-1, len(start))) + start  # (B, G, KH * KW * 2, H, W)
    return torch.where(sample.flatten(1, 2) == -1, offset.detach(), offset)
