import math

import pytest
import torch
from mmcv.ops import deform_conv2d, modulated_deform_conv2d
from mmcv.ops import multi_scale_deform_attn as mmcv_attention
from torchvision.ops import deform_conv2d as torchvision_deform_conv2d

from mrla_mm.errors import InputError

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


@pytest.mark.parametrize("geometry", [PLAIN, ODD], ids=["", "odd"])
@pytest.mark.parametrize("count", [3, 4], ids=["plain", "mask"])
def test_samples_one_pixel_in_front_of_the_map_give_their_offsets_no_gradient(
    device, geometry, count
):
    """As in mmcv, whose sampling ends there; offsets that start at zero lead to such samples."""
    grid = (5, 7) if geometry is PLAIN else (2, 8)
    x, offset, *others = tensors(geometry, device, torch.float64, grid)[:count]
    op, _ = deform_conv(geometry)

    def offset_gradient(value):
        constant = torch.full_like(offset, value, requires_grad=True)
        return torch.autograd.grad(op(x, constant, *others).sum(), constant)[0]

    before, at, behind = map(offset_gradient, (-1e-9, 0, 1e-9))
    expected = torch.where(before == 0, 0, behind)
    assert (expected - behind).abs().max() > 0.1, "no sample is in front of the map"
    torch.testing.assert_close(at, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("component", [0, 1], ids=["row", "column"])
def test_offsets_that_are_nan_are_refused_and_infinite_ones_lead_outside(component):
    x, offset, weight, *_ = tensors(PLAIN, torch.device("cpu"), torch.float64, (5, 7))
    op, _ = deform_conv(PLAIN)
    with torch.no_grad():
        offset[0, component::2, 2, 2] = math.inf
        assert op(x, offset, weight)[0, :, 2, 2].eq(0).all()
        offset[0, component, 2, 2] = math.nan
        with pytest.raises(InputError, match="NaN"):
            op(x, offset, weight)


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


def test_attention_to_samples_in_front_of_the_map_gives_their_locations_no_gradient(device):
    """Pixel centres moved by whole pixels, with which deformable DETR starts."""
    shapes = torch.tensor([[4, 5]], device=device)
    value = torch.randn(1, 20, 1, 3, device=device, dtype=torch.float64)
    weights = value.new_ones(1, 20, 1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    pixels = torch.stack([columns, rows], -1).reshape(1, 20, 1, 1, 1, 2).double() - 1
    locations = ((pixels + 0.5) / torch.tensor([5, 4])).to(device).requires_grad_()
    function = mmcv_attention.MultiScaleDeformableAttnFunction.apply
    out = function(value, shapes, shapes.new_zeros(1), locations, weights, 64)
    reference = mmcv_attention.multi_scale_deformable_attn_pytorch
    expected = reference(value, shapes, locations, weights)
    found, expected = (torch.autograd.grad(each.sum(), locations)[0] for each in (out, expected))
    in_front = (pixels == -1).to(device)
    assert found[in_front].abs().max() == 0 < expected[in_front].abs().max()
    torch.testing.assert_close(found[~in_front], expected[~in_front])
