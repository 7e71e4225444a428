"""Multiply-adds are those counted by hand, and no operator of ours is left out."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn
from torchvision.ops import roi_align

from mrla_mm.analysis.complexity import OperationCounter, measure
from mrla_mm.config import read_config
from mrla_mm.inference import build_model

C, H, W = 32, 10, 14
MAP = C * H * W
RESNET = dict(type="MRLAResNet", depth=18)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.mark.parametrize(
    ("module", "shapes", "expected"),
    [
        (nn.Conv2d(C, C, 3, padding=1, groups=C), [(2, C, H, W)], 2 * MAP * 9),
        (nn.Conv2d(C, 8, 3, stride=2, padding=1, groups=4), [(1, C, H, W)], 8 * 5 * 7 * C // 4 * 9),
        (nn.ConvTranspose2d(C, 16, 2, stride=2), [(1, C, H, W)], MAP * 16 * 4),
        (nn.Conv1d(1, 1, 5, padding=2, bias=False), [(3, 1, C)], 3 * C * 5),
        (nn.Linear(C, 7, bias=False), [(2, 5, C)], 10 * C * 7),
        (Call(torch.matmul), [(2, 3, 4, 5), (2, 3, 5, 6)], 6 * 4 * 5 * 6),
        (Call(F.scaled_dot_product_attention), [(2, 5, 8), (2, 9, 8), (2, 9, 3)], 90 * (8 + 3 + 2)),
        (Call(lambda a, b: a.mul_(b).add_(a)), [(1, C, H, W), (1, C, H, W)], MAP),
        (Call(lambda a, b: torch.sub(a, b, alpha=2)), [(1, C, H, W), (1, C, H, W)], MAP),
        (Call(lambda a, b: torch.cat([a, b]).relu() + 1), [(1, C, H, W), (1, C, H, W)], 0),
        (nn.BatchNorm2d(C), [(1, C, H, W)], MAP),
        (nn.LayerNorm(C), [(5, C)], 3 * 5 * C),
        (nn.GroupNorm(4, C, affine=False), [(1, C, H, W)], 2 * MAP),
        (nn.GELU(), [(5, C)], 5 * C),
        (nn.Hardswish(), [(5, C)], 2 * 5 * C),
    ],
)
def test_operators(module, shapes, expected):
    module = module.eval().to("meta")
    with torch.no_grad(), OperationCounter(module) as counter:
        module(*(torch.zeros(shape, device="meta") for shape in shapes))
    assert not counter.unknown and sum(counter.counts.values()) == expected


@pytest.mark.parametrize(
    "backbone",
    [
        dict(type="MRLAViT", arch="deit-tiny", img_size=64, out_type="featmap"),
        dict(type="MRLACeiT", arch="ceit-tiny"),
        dict(type="MRLAPVTv2", arch="b0"),
        dict(type="MRLAEfficientNet", arch="b0"),
        dict(RESNET, layer_attention=dict(type="LinearRLA", head_channels=16)),
        dict(RESNET, layer_attention=dict(type="mrla_mm.DLALight")),
        dict(RESNET, layer_attention=dict(type="mrla_mm.KCLA"), zero_init_attention=False),
    ],
    ids=lambda backbone: backbone.get("layer_attention", backbone)["type"],
)
def test_the_rule_names_every_operator_of_our_backbones(backbone):
    found = measure(MODELS.build(backbone), (64, 96))
    assert not found.unknown and found == measure(MODELS.build(backbone), (64, 96), device="cpu")
    assert found.by_module()[""] == (sum(found.parameters.values()), found.total)
    parts = [operations for name, (_, operations) in found.by_module(1).items() if name]
    own = [count for (name, _), count in found.operations.items() if not name]
    assert sum(parts) + sum(own) == found.total
    kinds = found.by_kind()
    assert sum(kinds.values()) == found.total > kinds["depthwise convolutions"] > 0


def test_mask_rcnn_at_the_papers_size():
    plain, light, base = (
        measure(build_model(read_config(f"mrla_mm::mask_rcnn_r50{suffix}_1x.py", {})), (800, 1280))
        for suffix in ("", "_mrla_light", "_mrla_base")
    )
    assert (light.total - plain.total) / 1e9 == pytest.approx(1.352, abs=1e-3), "the paper has 1.35"
    assert light.by_kind()["depthwise convolutions"] / 1e9 == pytest.approx(1.0138, abs=1e-4)
    assert (base.total - plain.total) / 1e9 == pytest.approx(1.405, abs=0.01), "the paper has 13.91"
    assert light.trainable / 1e6 == pytest.approx(44.34, abs=0.005)


def test_operators_that_are_not_torchs_are_named():
    found = measure(Call(lambda image: roi_align(image * 2, [image.new_zeros(1, 4)], 2)), (8, 8))
    assert found.total == 3 * 64 and found.unknown == {"torchvision::roi_align": 1}
