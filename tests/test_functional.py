"""The cheaper forms of the equations against the plain ones; tests/attention has less precision."""

import functools

import pytest
import torch

from mrla_mm import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 24, 5, 7), (3, 20, 1, 9), (2, 12, 14, 13), (2, 8, 1, 1)]


def draw(shape):
    torch.manual_seed(0)
    batch, channels = shape[:2]
    tensors = torch.randn(shape), torch.randn(channels, 1, 3, 3), torch.rand(batch, channels)
    tensors = [*tensors, torch.randn(batch, channels)]
    return [tensor.to(DEVICE, torch.float64).requires_grad_() for tensor in tensors]


def plain(x, weight, gain, offset):
    """x + gain f_V(x) + offset, tap by tap."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    height, width = x.shape[2:]
    value = 0
    for row in range(3):
        for column in range(3):
            tap = weight[:, 0, row, column, None, None]
            value = value + tap * padded[:, :, row : row + height, column : column + width]
    return x + gain[..., None, None] * value + offset[..., None, None]


add_scaled_value = functools.partial(functional.scaled_value, residual=True)


def by_sample_kernels(x, weight, gain, offset):
    kernels = functional.kernels_per_sample(weight, gain, identity=True)
    return functional.depthwise_per_sample(x, kernels, offset)


def outcome(function, tensors):
    out = function(*tensors)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, *torch.autograd.grad(out, tensors, probe)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gain_residual_and_offset_inside_the_convolution_equal_those_outside(shape):
    tensors = draw(shape)
    expected = outcome(plain, tensors)
    for function in (by_sample_kernels, add_scaled_value):
        torch.testing.assert_close(outcome(function, tensors), expected, rtol=1e-12, atol=1e-12)


def test_an_empty_batch():
    x, weight, gain, offset = (tensor.float() for tensor in draw((0, 8, 6, 5)))
    assert add_scaled_value(x, weight, gain, offset).shape == x.shape
