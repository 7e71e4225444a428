"""A convolution and the batch norm with frozen statistics behind it as one convolution.

Frozen, the norm is a linear function of each channel, norm(conv(x; W)) = conv(x; s W) + t. Its scale goes into the
weights, so that nothing of the size of a map is kept for it; the gradients of the norm's weight and bias follow from
those of s W and t (You et al., Efficient ConvBN Blocks for Transfer Learning and Beyond, 2023).
"""

import torch
from torch import Tensor, nn

from mrla_mm.attention.residual import frozen, is_frozen, is_heard
from mrla_mm.ops import choose_path
from mrla_mm.ops.gating import NARROW

# Numbers of a map from which on passes over it cost more than the small operations that replace them: with two cores,
# and, by the launches and the bandwidth of a large GPU, reckoned but not measured.
LEAST_NUMBERS = {"cpu": 2**17, "cuda": 2**24}


def normed(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(conv(x)): (B, C', H', W') -> (B, C, H, W)."""
    if not folds(conv, norm, x):
        return norm(conv(x))
    scale, offset = frozen(norm).fold()
    bias = offset if conv.bias is None else torch.addcmul(offset, scale, conv.bias)
    weight, kind = conv.weight * scale[:, None, None, None], conv.weight.dtype
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if bias.requires_grad and (kind in NARROW or autocast):
        return SumGradient.apply(conv._conv_forward(x, weight.to(kind), bias.detach().to(kind)), bias)
    return conv._conv_forward(x, weight.to(kind), bias.to(kind))


class SumGradient(torch.autograd.Function):
    """The output of a convolution that added a bias already, of which autograd does not know yet.

    Through a bias of its own, the sum of the gradients would be rounded to half precision. Of two such sums, one times
    the running mean, the gradient of the norm's weight is the difference, often a small one.
    """

    @staticmethod
    def forward(ctx, out, bias):
        """Return out (B, C, H, W) as it is; bias (C,)."""
        ctx.mark_dirty(out)  # the same tensor, which may go through ReLU in place
        ctx.kind = bias.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        """Sum over samples and grid in the precision of the bias."""
        return grad, grad.sum((0, 2, 3), dtype=ctx.kind)


def folds(conv: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether the norm can go into the convolution's weights, and saves something there.

    It cannot where somebody listens to either of them or exchanged what it computes. It saves nothing where the map
    has fewer numbers than the weights, and a compiler joins the norm's passes with others by itself.
    """
    plain = type(conv) is nn.Conv2d and is_frozen(norm) and not is_heard(conv) and not is_heard(norm)
    if not plain or torch.compiler.is_compiling() or choose_path(x).path == "reference":
        return False
    rows, columns = conv.stride
    numbers = conv.out_channels * x.shape[0] * (x.shape[2] // rows) * (x.shape[3] // columns)
    least = LEAST_NUMBERS.get(x.device.type, LEAST_NUMBERS["cuda"])
    return numbers >= max(least, conv.weight.numel())


def projected(modules: nn.Module, x: Tensor) -> Tensor:
    """Run a shortcut's projection, whose last two modules are folded: (B, C', H', W') -> (B, C, H, W)."""
    if type(modules) is not nn.Sequential or len(modules) < 2 or is_heard(modules):
        return modules(x)
    *before, conv, norm = modules
    for module in before:
        x = module(x)
    return normed(conv, norm, x)
