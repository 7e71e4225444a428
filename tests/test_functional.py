"""The cheaper forms of the equations against the plain ones: in double precision, then in less."""

import functools

import pytest
import torch

from mrla_mm import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 24, 5, 7), (3, 20, 1, 9), (2, 12, 14, 13), (2, 8, 1, 1), (1, 6, 40, 1)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a view of tokens": lambda x: x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),
    "expanded": lambda x: x[:, :, :1, :1].expand(x.shape),
}


def draw(shape, dtype=torch.float64):
    torch.manual_seed(0)
    batch, channels = shape[:2]
    tensors = torch.randn(shape), torch.randn(channels, 1, 3, 3), torch.rand(batch, channels)
    tensors = [*tensors, torch.randn(batch, channels)]
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors]


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
    kernels = gain[..., None, None] * weight[:, 0]
    kernels = kernels + torch.nn.functional.pad(kernels.new_ones(1, 1), (1, 1, 1, 1))
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


def test_second_derivatives():
    tensors = draw((2, 3, 2, 3))
    assert torch.autograd.gradgradcheck(by_sample_kernels, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_precisions_and_layouts(dtype, shape, layout):
    """Maps in a precision, everything pooled in at least single, as in a detector."""
    x, *others = draw(shape)
    x = LAYOUTS[layout](x.detach().to(dtype)).requires_grad_()
    expected = outcome(plain, [x.detach().double().requires_grad_(), *others])
    weight, *pooled = others
    single = torch.promote_types(dtype, torch.float32)
    tensors = [x, weight.to(dtype), *(tensor.to(single) for tensor in pooled)]
    tensors = [tensor.detach().requires_grad_() for tensor in tensors[1:]]
    found = outcome(add_scaled_value, [x, *tensors])
    assert found[0].dtype == dtype
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm().clamp_min(0.1)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_weights_survive_beside_the_residual_in_half_precision(dtype, layout):
    """A branch worth 1/300 of x, which a kernel with the 1 of the residual would round away."""
    x, weight, gain, offset = (t.detach() for t in draw((2, 8, 6, 5)))
    x = LAYOUTS[layout](x.to(dtype))
    gain, offset = 3e-3 * gain, 0 * offset
    exact = plain(x.double(), weight, gain, offset)
    y = add_scaled_value(x, weight.to(dtype), gain.float(), offset.float())
    rounded = exact.to(dtype).double()
    assert (y.double() - rounded).norm() < 0.5 * (rounded - exact).norm()


def test_an_empty_batch():
    x, weight, gain, offset = draw((0, 8, 6, 5), torch.float32)
    assert add_scaled_value(x, weight, gain, offset).shape == x.shape


def test_a_zero_gain_changes_no_bit():
    x, weight, gain, offset = draw((2, 8, 6, 5), torch.float32)
    assert torch.equal(add_scaled_value(x, weight, 0 * gain, 0 * offset), x)
