import pytest
import torch
from mmcv.ops import carafe, deform_conv2d, masked_conv2d, modulated_deform_conv2d
from mmcv.ops import multi_scale_deform_attn as mmcv_attention
from torch.nn.functional import conv2d, interpolate, unfold
from torchvision.ops import deform_conv2d as torchvision_deform_conv2d

from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in
PLAIN = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, deform_groups=1)
ODD = dict(stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2, deform_groups=2)


def tensors(geometry, device, dtype, grid):
    taps = 3 * 2 * geometry["deform_groups"]
    weight = (6, 4 // geometry["groups"], 3, 2)
    shapes = [(2, 4, 5, 6), (2, 2 * taps, *grid), weight, (2, taps, *grid), (6,)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made[1] = made[1].round() + torch.rand(shapes[1]) * 0.5 + 0.25  # off the kinks at cell centres
    return [t.to(device, dtype).requires_grad_() for t in made]


def deform_conv(geometry):
    stride, padding, dilation, *_ = geometry.values()

    def op(x, offset, weight, mask=None, bias=None):
        if mask is None:
            return deform_conv2d(x, offset, weight, *geometry.values())
        return modulated_deform_conv2d(x, offset, mask, weight, bias, *geometry.values())

    def expected(x, offset, weight, mask=None, bias=None):
        options = dict(stride=stride, padding=padding, dilation=dilation)
        return torchvision_deform_conv2d(x, offset, weight, bias, **options, mask=mask)

    return op, expected


@pytest.mark.parametrize(("geometry", "grid"), [(PLAIN, (5, 7)), (ODD, (2, 8))], ids=["", "odd"])
@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((count, torch.float64) for count in (3, 4, 5)), (5, torch.float16), (5, torch.bfloat16)],
    ids=["plain", "mask", "mask and bias", "float16", "bfloat16"],
)
def test_deformable_convolution(device, geometry, grid, count, dtype):
    check_op(*deform_conv(geometry), tensors(geometry, device, dtype, grid)[:count])


def test_offsets_of_a_larger_grid_are_read_as_flat_memory(device):
    geometry = dict(PLAIN, stride=(2, 2))
    x, offset, weight, mask, _ = tensors(geometry, device, torch.float64, grid=(5, 7))
    op, convolution = deform_conv(geometry)

    def expected(x, offset, weight, mask):
        strided = [
            t.as_strided((*t.shape[:2], 3, 4), (t[0].numel(), 12, 4, 1)) for t in (offset, mask)
        ]
        return convolution(x, strided[0], weight, strided[1])

    check_op(op, expected, [x, offset, weight, mask])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_multi_scale_attention(device, dtype):
    shapes = torch.tensor([[4, 5], [2, 3]], device=device)
    starts = torch.tensor([0, 20], device=device)
    sizes = [(2, 26, 2, 3), (2, 4, 2, 2, 3, 2), (2, 4, 2, 2, 3)]
    inputs = [torch.rand(size).to(device, dtype).requires_grad_() for size in sizes]
    function = mmcv_attention.MultiScaleDeformableAttnFunction.apply
    reference = mmcv_attention.multi_scale_deformable_attn_pytorch
    check_op(
        lambda value, *rest: function(value, shapes, starts, *rest, 64),
        lambda value, *rest: reference(value, shapes, *rest),
        inputs,
        atol=2e-2,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(("kernel", "groups", "scale"), [(3, 2, 2), (5, 1, 3), (1, 4, 1)])
def test_carafe(device, kernel, groups, scale, dtype):
    features = torch.randn(2, 4, 3, 5, device=device)
    masks = torch.rand(2, groups * kernel**2, 3 * scale, 5 * scale, device=device) / kernel

    def expected(features, masks):
        patches = unfold(features, kernel, padding=kernel // 2).unflatten(2, (3, 5))
        patches = interpolate(patches, scale_factor=scale).unflatten(1, (groups, -1, kernel**2))
        return (patches * masks.unflatten(1, (groups, 1, -1))).sum(3).flatten(1, 2)

    inputs = [tensor.to(dtype).requires_grad_() for tensor in (features, masks)]
    check_op(lambda *tensors: carafe(*tensors, kernel, groups, scale), expected, inputs)


@pytest.mark.parametrize("density", [0.4, 0])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_masked_convolution_is_the_convolution_inside_the_mask(device, kernel, density):
    image = torch.randn(1, 3, 6, 7, device=device)
    mask = torch.rand(1, 6, 7, device=device) < density
    weight, bias = torch.randn(4, 3, *kernel, device=device), torch.randn(4, device=device)
    padding = tuple(size // 2 for size in kernel)
    expected = conv2d(image, weight, bias, padding=padding) * mask
    found = masked_conv2d(image, mask, weight, bias, padding)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
