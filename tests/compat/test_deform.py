import mmcv
import pytest
import torch
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack, deform_conv2d, modulated_deform_conv2d
from torch.testing import assert_close

from tests.compat import reference
from tests.compat.stand_in import needs_stand_in

pytestmark = needs_stand_in

GEOMETRIES = pytest.mark.parametrize(
    "geometry",
    [
        dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, deform_groups=1),
        dict(stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2, deform_groups=2),
    ],
    ids=["plain", "strided, dilated, grouped"],
)


def tensors(geometry, device="cpu", dtype=torch.float64):
    """Input, offset, weight, mask, bias."""
    height, width, kernel = 5, 6, (3, 2)
    out = [
        (size + 2 * pad - dilation * (k - 1) - 1) // stride + 1
        for size, k, stride, pad, dilation in zip(
            (height, width), kernel, geometry["stride"], geometry["padding"], geometry["dilation"], strict=True
        )
    ]
    taps = kernel[0] * kernel[1] * geometry["deform_groups"]
    shapes = [(2, 4, height, width), (2, 2 * taps, *out), (6, 4 // geometry["groups"], *kernel), (2, taps, *out), (6,)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made[1] = made[1].round() + torch.rand(shapes[1]) * 0.5 + 0.25  # off the cell centres, where gradients jump
    made[3] = made[3].sigmoid()
    return [t.to(device, dtype).requires_grad_() for t in made]


def gradients(output, inputs, by):
    return torch.autograd.grad(output, inputs, by.to(output.dtype))


@GEOMETRIES
def test_plain(device, geometry):
    inputs = tensors(geometry, device)[:3]
    out = deform_conv2d(*inputs, *geometry.values())
    expected = reference.deform_conv(*inputs, **geometry)
    assert_close(out, expected)
    by = torch.randn_like(out)
    assert_close(gradients(out, inputs, by), gradients(expected, inputs, by))


@GEOMETRIES
@pytest.mark.parametrize("with_bias", [True, False])
def test_modulated(device, geometry, with_bias):
    inputs = tensors(geometry, device)[: 4 + with_bias]
    x, offset, weight, mask, *bias = inputs
    out = modulated_deform_conv2d(x, offset, mask, weight, *(bias or [None]), *geometry.values())
    expected = reference.deform_conv(x, offset, weight, mask=mask, bias=bias[0] if bias else None, **geometry)
    assert_close(out, expected)
    by = torch.randn_like(out)
    assert_close(gradients(out, inputs, by), gradients(expected, inputs, by))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    geometry = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, deform_groups=1)
    inputs = tensors(geometry, device, dtype)
    x, offset, weight, mask, bias = inputs
    out = modulated_deform_conv2d(x, offset, mask, weight, bias, *geometry.values())
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference.deform_conv(*exact[:3], mask=exact[3], bias=exact[4], **geometry)
    by = torch.randn_like(out)
    tolerance = dict(atol=2e-3, rtol=2 * torch.finfo(dtype).eps)
    assert out.dtype == dtype
    assert_close(out.double(), expected, **tolerance)
    for ours, theirs in zip(gradients(out, inputs, by), gradients(expected, exact, by), strict=True):
        assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("module", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_layers_train(device, module):
    layer = module(4, 6, 3, padding=1, deform_groups=2).to(device)
    loss = layer(torch.randn(2, 4, 8, 9, device=device)).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.weight.grad.abs().sum() > 0


def test_multi_scale_attention(device):
    shapes = torch.tensor([[4, 5], [2, 3]], device=device)
    sizes = [(2, 26, 2, 3), (2, 4, 2, 2, 3, 2), (2, 4, 2, 2, 3)]  # value, locations, weights
    inputs = [torch.rand(s, dtype=torch.float64, device=device).requires_grad_() for s in sizes]
    value, locations, weights = inputs
    starts = torch.tensor([0, 20], device=device)
    arguments = (value, shapes, starts, locations * 1.2 - 0.1, weights)
    out = mmcv._ext.ms_deform_attn_forward(*(t.detach() for t in arguments), im2col_step=64)
    expected = reference.ms_deform_attn(value, shapes, arguments[3], weights)
    assert_close(out, expected)
    by = torch.randn_like(out)
    grads = [torch.zeros_like(t) for t in inputs]
    mmcv._ext.ms_deform_attn_backward(*(t.detach() for t in arguments), by, *grads, im2col_step=64)
    assert_close(grads, [g * s for g, s in zip(gradients(expected, inputs, by), (1, 1 / 1.2, 1), strict=True)])
