"""A convolution and the batch norm with frozen statistics behind it, run as one convolution.

Frozen, the norm is an affine function of each channel, norm(conv(x; W)) = conv(x; s W) + t. With
its scale in the weights no map is saved for it; the gradients of the norm's weight and bias follow
from those of s W and t (You et al., Efficient ConvBN Blocks for Transfer Learning and Beyond,
2023).
"""

import torch
from torch import Tensor, nn

from mrla_mm.attention.base import is_patched
from mrla_mm.ops import choose_path, frozen_bn_affine, why_not_fused
from mrla_mm.torch_support import is_autocast_enabled

# Minimum number of elements of the output at which folding pays off: measured with two cores,
# estimated for a GPU (ten norms above it save 1 ms on an H100; smaller maps were not tried).
MIN_NUMEL_TO_FOLD = {"cpu": 2**17, "cuda": 2**24}


def conv_bn(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(conv(x)): (B, C', H', W') -> (B, C, H, W)."""
    if not can_fold_bn(conv, norm, x):
        return norm(conv(x))
    scale, offset = frozen_bn_affine(
        norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
    )
    bias = offset if conv.bias is None else torch.addcmul(offset, scale, conv.bias)
    weight = conv.weight * scale[:, None, None, None]
    dtype = conv.weight.dtype
    autocast = is_autocast_enabled(x.device.type)
    if bias.requires_grad and (dtype in (torch.float16, torch.bfloat16) or autocast):
        out = conv._conv_forward(x, weight.to(dtype), bias.detach().to(dtype))
        return BiasGradient.apply(out, bias)
    return conv._conv_forward(x, weight.to(dtype), bias.to(dtype))


class BiasGradient(torch.autograd.Function):
    """Gives a bias, detached in the convolution that added it, a gradient in its own precision.

    A convolution in half precision would round it, a sum over the map. The gradient of the norm's
    weight is the difference of two such sums, often a small one.
    """

    @staticmethod
    def forward(ctx, out, bias):
        """Return out (B, C, H, W) as it is; bias (C,)."""
        ctx.mark_dirty(out)  # the same tensor, which may go through ReLU in place
        ctx.dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        """Sum over samples and grid in the precision of the bias."""
        return grad, grad.sum((0, 2, 3), dtype=ctx.dtype)


def can_fold_bn(conv: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether the norm can be folded, and the output is large enough that this pays."""
    if type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d or why_not_fused(x):
        return False
    if norm.training or norm.running_mean is None:
        return False
    stride_h, stride_w = conv.stride
    batch, _, height, width = x.shape
    numel = conv.out_channels * batch * (height // stride_h) * (width // stride_w)
    minimum = MIN_NUMEL_TO_FOLD.get(x.device.type, MIN_NUMEL_TO_FOLD["cuda"])
    if numel < max(minimum, conv.weight.numel()) or is_patched(conv) or is_patched(norm):
        return False
    return choose_path(x).path != "naive"


def run_downsample(downsample: nn.Module, x: Tensor) -> Tensor:
    """Run a shortcut's projection with its norm folded: (B, C', H', W') -> (B, C, H, W)."""
    if type(downsample) is not nn.Sequential or len(downsample) < 2 or is_patched(downsample):
        return downsample(x)
    *before, conv, norm = downsample
    for module in before:
        x = module(x)
    return conv_bn(conv, norm, x)
