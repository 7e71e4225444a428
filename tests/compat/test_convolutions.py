import pytest
import torch
from mmcv.ops import carafe, deform_conv2d, masked_conv2d, modulated_deform_conv2d
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

from . import reference
from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in

GEOMETRIES = pytest.mark.parametrize(
    "geometry",
    [
        dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, deform_groups=1),
        dict(stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2, deform_groups=2),
    ],
    ids=["plain", "strided, dilated, grouped"],
)


def tensors(geometry, device, dtype):
    """Input, offset, weight, mask, bias."""
    height, width, kernel = 5, 6, (3, 2)
    rows = zip(
        (height, width),
        kernel,
        geometry["stride"],
        geometry["padding"],
        geometry["dilation"],
        strict=True,
    )
    out = [
        (size + 2 * pad - spread * (k - 1) - 1) // stride + 1
        for size, k, stride, pad, spread in rows
    ]
    taps = kernel[0] * kernel[1] * geometry["deform_groups"]
    shapes = [
        (2, 4, height, width),
        (2, 2 * taps, *out),
        (6, 4 // geometry["groups"], *kernel),
        (2, taps, *out),
        (6,),
    ]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made[1] = (
        made[1].round() + torch.rand(shapes[1]) * 0.5 + 0.25
    )  # off the cell centres, where gradients jump
    made[3] = made[3].sigmoid()
    return [t.to(device, dtype).requires_grad_() for t in made]


@GEOMETRIES
@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((count, torch.float64) for count in (3, 4, 5)), (5, torch.float16), (5, torch.bfloat16)],
    ids=["plain", "mask", "mask and bias", "float16", "bfloat16"],
)
def test_deformable_convolution(device, geometry, count, dtype):
    def op(x, offset, weight, *mask_and_bias):
        if not mask_and_bias:
            return deform_conv2d(x, offset, weight, *geometry.values())
        mask, bias = (*mask_and_bias, None)[:2]
        return modulated_deform_conv2d(x, offset, mask, weight, bias, *geometry.values())

    def expected(x, offset, weight, mask=None, bias=None):
        return reference.deform_conv(x, offset, weight, mask=mask, bias=bias, **geometry)

    check_op(op, expected, tensors(geometry, device, dtype)[:count])


def test_offsets_of_a_larger_grid_are_read_as_flat_memory(device):
    """DyHead's are of a finer map; compiled mmcv reads the beginning of each sample's memory."""
    geometry = dict(stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=1, deform_groups=1)
    x, offset, weight, mask, _ = tensors({**geometry, "stride": (1, 1)}, device, torch.float64)

    def expected(x, offset, weight, mask):
        offset, mask = (
            t.as_strided((*t.shape[:2], 3, 4), (t.stride(0), 12, 4, 1)) for t in (offset, mask)
        )
        return reference.deform_conv(x, offset, weight, mask=mask, **geometry)

    def op(x, offset, weight, mask):
        return modulated_deform_conv2d(x, offset, mask, weight, None, *geometry.values())

    check_op(op, expected, [x, offset, weight, mask])


def test_multi_scale_attention(device):
    shapes, starts = (
        torch.tensor([[4, 5], [2, 3]], device=device),
        torch.tensor([0, 20], device=device),
    )
    sizes = [(2, 26, 2, 3), (2, 4, 2, 2, 3, 2), (2, 4, 2, 2, 3)]
    value, locations, weights = (
        torch.rand(size, dtype=torch.float64, device=device) for size in sizes
    )
    check_op(
        lambda value, *rest: MultiScaleDeformableAttnFunction.apply(
            value, shapes, starts, *rest, 64
        ),
        lambda value, *rest: reference.ms_deform_attn(value, shapes, *rest),
        [tensor.requires_grad_() for tensor in (value, locations * 1.2 - 0.1, weights)],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(("kernel", "groups", "scale"), [(3, 2, 2), (5, 1, 3), (1, 4, 1)])
def test_carafe(device, kernel, groups, scale, dtype):
    features = torch.randn(2, 4, 3, 5, device=device)
    masks = torch.rand(2, groups * kernel**2, 3 * scale, 5 * scale, device=device) / kernel
    check_op(
        lambda *inputs: carafe(*inputs, kernel, groups, scale),
        lambda *inputs: reference.carafe(*inputs, kernel, groups, scale),
        [tensor.to(dtype).requires_grad_() for tensor in (features, masks)],
    )


@pytest.mark.parametrize("density", [0.4, 0])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_masked_convolution_is_the_convolution_inside_the_mask_and_zero_outside(
    device, kernel, density
):
    image, mask = (
        torch.randn(1, 3, 6, 7, device=device),
        torch.rand(1, 6, 7, device=device) < density,
    )
    weight, bias = torch.randn(4, 3, *kernel, device=device), torch.randn(4, device=device)
    padding = tuple(size // 2 for size in kernel)
    expected = torch.nn.functional.conv2d(image, weight, bias, padding=padding) * mask
    torch.testing.assert_close(
        masked_conv2d(image, mask, weight, bias, padding), expected, atol=1e-5, rtol=1e-5
    )
