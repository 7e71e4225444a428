import math

import pytest
import torch
from mmcv.ops import roi_align
from torch.nn.functional import avg_pool2d, grid_sample, max_pool2d

from mrla_mm.compat.ext_ops import roi

from .conftest import check_op, needs_stand_in

pytestmark = needs_stand_in

ROIS = [
    [0, 3.1, 2.3, 17.9, 22.2],
    [1, 0.0, 0.0, 26.0, 18.0],  # the whole map
    [1, -9.0, -7.0, 8.0, 9.0],  # across the border
    [0, 20.0, 10.0, 44.0, 33.0],
    [0, 70.0, 70.0, 90.0, 90.0],  # outside
    [1, 5.3, 4.2, 5.4, 4.4],  # smaller than a pixel
    [0, 4.0, 4.0, 4.0, 4.0],  # without area
    [1, 9.0, 8.0, 6.0, 5.0],  # corners exchanged
]


@pytest.fixture
def sparse(monkeypatch):
    """Compute every average as a sparse product, torchvision's operator being out of reach."""
    monkeypatch.setattr(roi, "FORWARD", (0, float("inf")))
    monkeypatch.setattr(roi, "BACKWARD", (0, float("inf")))
    monkeypatch.setattr(roi, "torchvision_ops", None)


def reference(maps, rois, shape, scale, ratio, mode, aligned):
    pool = max_pool2d if mode == "max" else avg_pool2d
    height, width = maps.shape[2:]
    pooled = []
    for image, *corners in rois.tolist():
        left, top, right, bottom = (corner * scale - aligned / 2 for corner in corners)
        places, grid = [], []
        for start, end, bins in ((top, bottom, shape[0]), (left, right, shape[1])):
            size = (end - start if aligned else max(end - start, 1)) / bins
            grid.append(ratio or max(math.ceil(size), 0))
            steps = torch.arange(bins * grid[-1], device=maps.device).to(maps) + 0.5
            places.append(start + steps * size / max(grid[-1], 1))
        if 0 in grid:
            pooled.append(maps.new_zeros(maps.shape[1], *shape))
            continue
        y, x = torch.meshgrid(*places, indexing="ij")
        points = torch.stack([x / (width - 1), y / (height - 1)], -1)[None] * 2 - 1
        options = dict(padding_mode="border", align_corners=True)
        samples = grid_sample(maps[int(image)][None], points, **options)[0]
        inside = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
        pooled.append(pool(samples * inside, grid))
    return torch.stack(pooled)


@pytest.mark.parametrize("way", ["torchvision", "sparse", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 2])
def test_output_and_gradient(device, way, dtype, aligned, ratio, request):
    if way == "sparse":
        if device.type != "cpu":
            pytest.skip("the sparse product is for CPUs")
        request.getfixturevalue("sparse")
    rois = torch.tensor(ROIS, device=device).to(dtype)
    arguments = ((3, 2), 0.5, ratio, "max" if way == "max" else "avg", aligned)
    expected = lambda x: reference(x, rois.double(), *arguments)  # noqa: E731
    x = torch.randn(2, 3, 9, 13, device=device).to(dtype).requires_grad_()
    check_op(lambda x: roi_align(x, rois, *arguments), expected, [x], atol=1e-3)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_no_rois(device, mode):
    x = torch.randn(2, 3, 9, 13, device=device, requires_grad=True)
    out = roi_align(x, x.new_zeros(0, 5), (3, 2), 0.5, 0, mode, True)
    assert out.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() == 0


@pytest.mark.parametrize(
    ("count", "largest", "side", "forward", "backward"),
    [
        (90, 90, 32, True, True),
        (90, 1000, 32, False, False),  # a RoI much larger than the map
        (30, 90, 32, False, True),
        (4, 90, 32, False, False),
        (60, 90, 160, False, True),
        (6, 90, 160, False, False),
    ],
)
def test_sparse_where_it_is_faster(monkeypatch, count, largest, side, forward, backward):
    calls = []
    monkeypatch.setattr(roi, "torchvision_ops", lambda: calls.append(1))
    x = torch.randn(2, 128, side, side, requires_grad=True)
    rois = torch.tensor([[1.0, 0, 0, 90, 90]] * (count - 1) + [[0.0, 0, 0, largest, largest]])
    out = roi_align(x, rois, (7, 7), 0.25, 0, "avg", True)
    assert bool(calls) != forward
    calls.clear()
    out.sum().backward()
    assert bool(calls) != backward
