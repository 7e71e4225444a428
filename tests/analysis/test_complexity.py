"""Counted multiply-adds are those one counts by hand, on meta tensors as on real ones, whatever path is asked for."""

import os

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.analysis import paper, sweeps
from mrla_mm.analysis.complexity import (
    Complexity,
    comparison_rows,
    fit_line,
    kind_rows,
    measure,
    module_rows,
)
from mrla_mm.analysis.counting import OperationCounter
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.cli import locate_config
from mrla_mm.errors import InputError

C, H, W = 32, 10, 14
MAP = C * H * W


class Call(nn.Module):
    """Module around a function."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *tensors):
        return self.function(*self.parts, *tensors)


def counted(module, *shapes):
    module = module.eval().to("meta")
    with torch.no_grad(), OperationCounter(module) as counter:
        module(*(torch.zeros(shape, device="meta") for shape in shapes))
    assert not counter.unknown
    return sum(counter.counts.values())


@pytest.mark.parametrize(
    ("module", "shapes", "expected"),
    [
        (nn.Conv2d(C, 8, 3, padding=1), [(1, C, H, W)], 8 * H * W * C * 9),
        (nn.Conv2d(C, C, 3, padding=1, groups=C), [(2, C, H, W)], 2 * MAP * 9),
        (nn.Conv2d(C, 8, 3, stride=2, padding=1, groups=4), [(1, C, H, W)], 8 * 5 * 7 * C // 4 * 9),
        (nn.ConvTranspose2d(C, 8, 2, stride=2), [(1, C, H, W)], H * W * C * 8 * 4),
        (nn.Conv1d(1, 1, 5, padding=2, bias=False), [(3, 1, C)], 3 * C * 5),
        (nn.Linear(C, 7), [(5, C)], 5 * C * 7),
        (nn.Linear(C, 7, bias=False), [(2, 5, C)], 10 * C * 7),
        (Call(torch.matmul), [(2, 3, 4, 5), (2, 3, 5, 6)], 6 * 4 * 5 * 6),
        (Call(F.scaled_dot_product_attention), [(1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 3)], 2 * 5 * 9 * (8 + 3 + 2)),
        (Call(lambda a, b: a * b), [(1, C, H, W), (1, C, 1, 1)], MAP),
        (Call(lambda a, b: torch.addcmul(a, b, a)), [(1, C, H, W), (1, C, H, W)], MAP),
        (Call(lambda a, b: a.mul_(b).add_(a)), [(1, C, H, W), (1, C, H, W)], MAP),
        (Call(lambda a, b: torch.cat([a, b]).relu() + 1), [(1, C, H, W), (1, C, H, W)], 0),
        (Call(lambda a: torch.einsum("bchw,bc->bhw", a, a[:, :, 0, 0])), [(1, C, H, W)], MAP),
        (nn.BatchNorm2d(C), [(1, C, H, W)], MAP),
        (nn.LayerNorm(C), [(5, C)], 3 * 5 * C),
        (nn.GroupNorm(4, C, affine=False), [(1, C, H, W)], 2 * MAP),
        (nn.GELU(), [(5, C)], 5 * C),
    ],
)
def test_operators(module, shapes, expected):
    assert counted(module, *shapes) == expected


def residual(variant, depth, **arguments):
    layers = [
        LayerAttentionResidual(
            dict(type=variant, head_channels=8, **arguments), C, norm_cfg=dict(type="BN"), first_in_stage=not index
        )
        for index in range(depth)
    ]

    def run(*modules_and_map):
        *modules, x = modules_and_map
        memory = None
        for module in modules:
            x, memory = module(x, x, memory)
        return x

    return Call(run, *layers)


SMALL = 2 * 3 * C  # query and key convolutions of 3 taps


@pytest.mark.parametrize(
    ("variant", "depth", "products"),
    [
        # depthwise convolution, gate, lambda, batch norm
        ("MRLALight", 3, 3 * (9 + 1 + 1 + 1)),
        # depthwise convolution and batch norm; t products at layer t
        ("MRLABase", 3, 3 * (9 + 1) + 6),
        # t depthwise convolutions and products at layer t; batch norm
        ("MLA", 3, 6 * 9 + 6 + 3),
    ],
)
def test_layer_attention_by_hand(variant, depth, products, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "reference")
    found = counted(residual(variant, depth), (1, C, H, W))
    assert 0 <= found - products * MAP <= 30 * depth * SMALL, "beyond the maps there is only what is pooled"


def test_the_path_that_is_asked_for_hides_nothing(monkeypatch):
    stage = residual("MRLALight", 2)
    found = {}
    for path in ("reference", "folded", ""):
        monkeypatch.setenv("MRLA_OPS", path)
        found[path] = measure(Backbone(stage), (H, W), device="cpu")
        assert os.environ["MRLA_OPS"] == path
    assert found["folded"] == found["reference"] == found[""]
    monkeypatch.delenv("MRLA_OPS")
    assert measure(Backbone(stage), (H, W)).operations == found[""].operations
    assert "MRLA_OPS" not in os.environ


class Backbone(nn.Module):
    """Stage behind a convolution that makes an image a map of its channels."""

    def __init__(self, stage):
        super().__init__()
        self.stem = nn.Conv2d(3, C, 1, bias=False)
        self.stage = stage

    def forward(self, image):
        return self.stage(self.stem(image))


def test_modules_kinds_and_differences():
    light, base = (measure(Backbone(residual(variant, 2)), (H, W)) for variant in ("MRLALight", "MRLABase"))
    table = light.by_module()
    assert table["stem"] == (3 * C, 3 * MAP)
    assert table[""] == (light.total_parameters, light.total)
    assert table["stage.parts.0"][1] == table["stage.parts.1"][1]
    assert table["stage.parts.0.norm"] == (2 * C, MAP)
    assert table["stage"][1] + table["stem"][1] == light.total
    assert set(light.by_module(1)) == {"", "stem", "stage"}
    assert light.by_kind()["depthwise convolutions"] == 2 * 9 * MAP
    assert module_rows(light, max_depth=1)[0]["module"] == "total"
    differing = [row["module"] for row in comparison_rows(light, base, max_depth=1)]
    assert differing == ["total", "stage"]
    assert base.total_parameters - light.total_parameters == -2 * C
    assert {row["operators"]: row["difference"] for row in kind_rows(light, base)}["norms"] == "+0.0000"


def test_an_operator_that_the_rule_does_not_name_is_reported():
    with OperationCounter(nn.Identity()) as counter:
        torch.ones(3).digamma()
    assert counter.unknown == {"aten::digamma": 1}


@pytest.mark.parametrize(
    "backbone",
    [
        dict(type="MRLAViT", arch="deit-tiny", img_size=64, out_type="featmap"),
        dict(type="MRLACeiT", arch="ceit-tiny"),
        dict(type="MRLAPVTv2", arch="b0"),
        dict(type="MRLAEfficientNet", arch="b0"),
        dict(type="MRLAResNet", depth=18, layer_attention=dict(type="LinearRLA", head_channels=16)),
    ],
    ids=lambda backbone: backbone["type"],
)
def test_the_rule_names_every_operator_of_our_backbones(backbone):
    model = MODELS.build(backbone)
    on_meta = measure(MODELS.build(backbone), (64, 96))
    really = measure(model, (64, 96), device="cpu")
    assert not on_meta.unknown and on_meta == really


def detector(name, **options):
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    cfg = Config.fromfile(locate_config(f"mrla_mm::{name}.py"))
    cfg.merge_from_dict(options)
    init_default_scope(cfg.default_scope)
    return MODELS.build(cfg.model)


def test_mask_rcnn_at_the_papers_size():
    plain, light, base = (
        measure(detector(f"mask_rcnn_r50{suffix}_1x"), (800, 1280)) for suffix in ("", "_mrla_light", "_mrla_base")
    )
    added = (light.total - plain.total) / 1e9
    assert added == pytest.approx(276.93 - 275.58, abs=0.15)
    assert light.by_kind()["depthwise convolutions"] / 1e9 == pytest.approx(1.0138, abs=1e-4)
    assert (base.total - plain.total) / 1e9 == pytest.approx(1.405, abs=0.01), "the paper says 13.91; see paper.NOTES"
    assert light.trainable / 1e6 == pytest.approx(44.34, abs=0.005)
    row = next(row for row in paper.ROWS if row.model == "Mask R-CNN R50 + light")
    cells = paper.compare(row, light, plain)
    assert cells["over plain [G]"] == "+1.352" and cells["paper's over plain"] == "+1.35"
    assert cells["paper's FLOPs [G]"] == "276.93"


def test_models_that_ask_for_values_and_shapes_that_cannot_be():
    class Picky(nn.Module):
        def forward(self, image):
            return image * int(image.sum().item())

    with pytest.raises(InputError, match=r"Picky asks for the values.*device cpu"):
        measure(Picky(), (8, 8))
    assert measure(Picky(), (8, 8), device="cpu").total == 3 * 64
    with pytest.raises(InputError, match=r"shape \(0, 8\)"):
        measure(Picky(), (0, 8))


def test_growth_with_pixels_and_depth():
    points = sweeps.by_resolution(
        lambda: Backbone(nn.Identity()), lambda: Backbone(residual("MRLALight", 2)), [16, 24, 40]
    )
    slope, offset, explained = fit_line(*zip(*points, strict=True))
    assert slope * 1e9 == pytest.approx(2 * 12 * C, rel=1e-3) and explained > 0.9999
    assert abs(offset) < 1e-4
    series = sweeps.by_depth([1, 2, 3, 4], size=32)
    steps = {
        name: [after[1] - before[1] for before, after in zip(p, p[1:], strict=False)] for name, p in series.items()
    }
    assert steps["light"][0] == pytest.approx(steps["light"][2])
    for name in ("MLA", "base"):
        assert steps[name][1] - steps[name][0] == pytest.approx(steps[name][2] - steps[name][1])
        assert steps[name][1] > steps[name][0]


def test_fit_line():
    assert fit_line([0, 1, 2], [1, 3, 5]) == pytest.approx((2, 1, 1))
    assert fit_line([0, 1, 2, 3], [0, 1, 1, 0])[2] == pytest.approx(0)


def test_plots(tmp_path):
    import cv2

    one = sweeps.plot_resolution([(100, 1.0), (400, 4.1)], tmp_path / "a/one.png", title="one")
    two = sweeps.plot_depth(
        {"light": [(1, 1.0), (2, 2.0)], "MLA": [(1, 1.0), (2, 4.0)]}, tmp_path / "two.png", title="two"
    )
    assert min(cv2.imread(str(one)).shape[:2]) > 300 and min(cv2.imread(str(two)).shape[:2]) > 300


def test_every_row_of_the_paper_has_a_config_and_a_plain_model():
    assert len({row.model for row in paper.ROWS}) == len(paper.ROWS)
    for row in paper.ROWS:
        locate_config(f"mrla_mm::{row.config}.py")
        plain = paper.plain_row(row)
        assert (plain is None) == ("+" not in row.model)
        assert plain is None or (plain.shape == row.shape and "mrla" not in plain.config)
    found = Complexity({"": 25_600_000}, 1, {("", "x"): int(4.3e9)}, {})
    cells = paper.compare(paper.ROWS[0], found, None)
    assert (cells["difference"], cells["difference [G]"]) == ("+0.00", "+0.20")
