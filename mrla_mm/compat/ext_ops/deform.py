"""Deformable convolution (Dai et al., ICCV 2017), also modulated (Zhu et al., CVPR 2019).

mmcv and torchvision order offsets alike: y before x, per kernel tap, per group. The buffers that
mmcv passes for its own kernels are left alone. Gradients are those of torchvision's op, which is
run again for them.

Offset and mask of a modulated convolution may be of a larger grid than the output (DyHead's are).
As mmcv's kernels index the memory of each sample as if it had the output's grid, its first elements
count and the others are unused.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype, torchvision_ops, write_gradients


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    **geometry,
) -> None:
    """Write the convolution into ``output`` (B, C_out, H_out, W_out)."""
    output.copy_(_convolution(output, _plain_geometry(**geometry))(input, offset, weight))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **geometry,
) -> None:
    """Write the gradients of input and offset."""
    tensors, wanted = [input, offset, weight], [grad_input, grad_offset, None]
    write_gradients(
        _convolution(grad_output, _plain_geometry(**geometry)), tensors, wanted, grad_output
    )


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    columns: Tensor,
    ones: Tensor,
    scale: float,
    **geometry,
) -> None:
    """Write ``scale`` times the gradient of the weight, which has the shape of ``grad_weight``."""
    weight = torch.zeros_like(grad_weight)  # this gradient does not depend on the weight's values
    tensors, wanted = [input, offset, weight], [None, None, grad_weight]
    write_gradients(
        _convolution(grad_output, _plain_geometry(**geometry)), tensors, wanted, grad_output
    )
    grad_weight.mul_(scale)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    with_bias: bool,
    **geometry,
) -> None:
    """Write the convolution into ``output``; ``bias`` counts if ``with_bias``."""
    tensors = [input, offset, weight, mask, bias][: 4 + with_bias]
    output.copy_(_convolution(output, _modulated_geometry(**geometry))(*tensors))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    with_bias: bool,
    **geometry,
) -> None:
    """Write the gradients of input, offset, weight, mask and, if ``with_bias``, bias."""
    count = 4 + with_bias
    tensors = [input, offset, weight, mask, bias][:count]
    wanted = [grad_input, grad_offset, grad_weight, grad_mask, grad_bias][:count]
    write_gradients(
        _convolution(grad_output, _modulated_geometry(**geometry)), tensors, wanted, grad_output
    )


def _plain_geometry(
    *, dH, dW, padH, padW, dilationH, dilationW, **rest
) -> dict[str, tuple[int, int]]:
    """Return torchvision's arguments; it reads kernel size and groups off the shapes."""
    return dict(stride=(dH, dW), padding=(padH, padW), dilation=(dilationH, dilationW))


def _modulated_geometry(
    *, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, **rest
) -> dict:
    return dict(
        stride=(stride_h, stride_w), padding=(pad_h, pad_w), dilation=(dilation_h, dilation_w)
    )


def _convolution(output: Tensor, geometry: dict) -> Callable[..., Tensor]:
    """Return the convolution to the grid of ``output``; if modulated, of mask and bias too."""
    size = output.shape[2:]

    def convolve(*tensors: Tensor) -> Tensor:
        input, offset, weight, *more = (t.to(compute_dtype(tensors[0])) for t in tensors)
        mask, bias = (*more, None, None)[:2]
        if mask is not None and mask.shape[2:] != size:
            offset, mask = (
                t.flatten(1)[:, : t.shape[1] * size.numel()].unflatten(1, (-1, *size))
                for t in (offset, mask)
            )
        return torchvision_ops().deform_conv2d(input, offset, weight, bias, mask=mask, **geometry)

    return convolve
