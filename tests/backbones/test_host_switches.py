"""What mmengine, mmcv and torch can do to a module changes no number, half precision few."""

import copy

import pytest
import torch
from mmcv.cnn import fuse_conv_bn
from mmengine.registry import MODELS
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn
from torch.nn.utils import prune

from mrla_mm import attention
from mrla_mm.errors import InputError

from ..comparators.test_resnets import plugin
from ..conftest import FLOAT16
from .common import FAMILIES, VARIANTS, branches, randomize

COMPARATOR = dict(type="mrla_mm.ComparatorResNet", depth=50, base_channels=8)
DIA = dict(layer_attention=dict(type="mrla_mm.DIA", reduction=4))
DLA = dict(type="mrla_mm.DLALight", head_channels=8, reduction=4)
KCLA = dict(layer_attention=dict(type="mrla_mm.KCLA", head_channels=8), zero_init_attention=False)
OTHERS = {
    "dia": dict(COMPARATOR, **DIA),
    "dia as a branch": dict(type="MRLAResNet", depth=18, base_channels=8, **DIA),
    "dla": dict(type="MRLAResNet", depth=18, base_channels=8, layer_attention=DLA),
    "kcla": dict(type="MRLAResNet", depth=18, base_channels=8, **KCLA),
    "rla": dict(type="mrla_mm.RLAResNet", depth=50, base_channels=8, out_hidden=True),
    "ba": dict(COMPARATOR, plugins=[plugin("mrla_mm.BA")]),
    "gates": dict(
        COMPARATOR, plugins=[plugin("mrla_mm.SE"), plugin("mrla_mm.ECA"), plugin("mrla_mm.CBAM")]
    ),
}
MEMBERS = [("resnet18", variant) for variant in VARIANTS]
MEMBERS += [(family, "base") for family in FAMILIES if family != "resnet18"]
MEMBERS += [(name, None) for name in OTHERS]


def build(name, variant="light"):
    torch.manual_seed(0)
    other = name in OTHERS
    backbone = MODELS.build(copy.deepcopy(OTHERS[name])) if other else FAMILIES[name].mrla(variant)
    return randomize(backbone).double()


def draw_image(*size):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, 3, *size, dtype=torch.float64, generator=generator)


def outputs_and_gradients(backbone):
    image = draw_image(64, 64).requires_grad_()
    backbone.zero_grad()
    levels = backbone(image)
    sum(level.square().mean() for level in levels).backward()
    gradients = [image.grad, *(p.grad for p in backbone.parameters() if p.requires_grad)]
    return levels, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize(("name", "variant"), MEMBERS)
def test_reentrant_checkpointing_of_blocks_and_branches(name, variant):
    backbone = build(name, variant)
    levels, gradients = outputs_and_gradients(backbone)
    modules = dict(backbone.named_modules())
    blocks = [name for name in modules if hasattr(modules[name], "downsample")]
    blocks = blocks or [name for name in modules if hasattr(modules[name], "mrla")]
    parts = [name for name in modules if modules[name] in branches(backbone)]
    for chosen in (blocks, parts):
        wrapped = copy.deepcopy(backbone)
        turn_on_activation_checkpointing(wrapped, chosen)
        found, found_gradients = outputs_and_gradients(wrapped)
        torch.testing.assert_close(found, levels)
        error = (found_gradients - gradients).norm() / gradients.norm()
        assert error < 1e-9, (chosen[:1], error)


@pytest.mark.parametrize("name", ["resnet18", "ceit", "efficientnet", "rla"])
@torch.no_grad()
def test_fused_convolutions_and_norms(name):
    backbone = build(name, "base").eval()
    expected = backbone(draw_image(64, 64))
    torch.testing.assert_close(fuse_conv_bn(backbone)(draw_image(64, 64)), expected)


@pytest.mark.parametrize(
    ("name", "variant"),
    [*(("resnet18", variant) for variant in VARIANTS), *((name, None) for name in OTHERS)],
)
def test_symbolic_tracing(name, variant):
    backbone = build(name, variant)
    traced = torch.fx.symbolic_trace(backbone)
    found, gradients = outputs_and_gradients(traced)
    expected, expected_gradients = outputs_and_gradients(backbone)
    torch.testing.assert_close(found, expected)
    image = 2 * 3 * 64 * 64  # whose gradients come first; a graph orders parameters its own way
    torch.testing.assert_close(gradients[:image], expected_gradients[:image])


def replace_forward(layer):
    layer.forward = layer.forward


CHANGES_OF_SHARED = {  # of DIA's cell, or of DLA-light's cell and convolution
    "prune": ("dia", lambda shared: prune.identity(shared.lstm.from_input[0], "weight")),
    "replace": ("dia", lambda shared: setattr(shared.lstm.from_input, "0", nn.Identity())),
    "forward": ("dla", lambda shared: replace_forward(shared.attention.cell.from_input[0])),
    "dilate": ("dla", lambda shared: setattr(shared.attention.context, "dilation", (2, 2))),
}


@pytest.mark.parametrize(("name", "change"), CHANGES_OF_SHARED.values(), ids=CHANGES_OF_SHARED)
def test_changing_what_a_stage_shares_is_refused(name, change):
    backbone = build(name)
    change(backbone.layer1[0].mrla)
    with pytest.raises(InputError, match="share"):
        backbone(draw_image(64, 64))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [torch.contiguous_format, torch.channels_last][: 1 + (DEVICE == "cuda")]
EXTREMES = {
    "zeros": lambda x: x * 0,
    "large": lambda x: x * 0 + 1e4,
    "both signs": lambda x: x.sign() * 1e4,
    "tiny": lambda x: x * 1e-7,
    "one spike": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 7, 3e4, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16], ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
def test_attention_stays_finite(name, kind, dtype):
    torch.manual_seed(0)
    module = getattr(attention, name)(8, head_channels=4).to(DEVICE, dtype)
    x = EXTREMES[kind](torch.randn(2, 8, 5, 7)).to(DEVICE, dtype).requires_grad_()
    out, memory = module(x, x)
    out, memory = module(out, x, memory)
    out.float().mean().backward()
    assert out.dtype == dtype and torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", ["light", "base"])
@pytest.mark.parametrize("name", ["resnet18", "vit", "ceit", "pvtv2", "efficientnet"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_autocast_is_near_single_precision(layout, name, variant):
    torch.manual_seed(0)
    model = FAMILIES[name].mrla(variant, zero_init_attention=False)
    model.init_weights()
    model.eval()  # batch statistics of a few pixels would magnify rounding
    model.to(DEVICE, memory_format=layout)
    image = torch.rand(2, 3, 64, 64, device=DEVICE).contiguous(memory_format=layout)
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            outs = model(image)
        sum(out.float().square().mean() for out in outs).backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((outs, torch.cat(grads)))
    (expected, exact), (outs, grads) = found
    for out, wanted in zip(outs, expected, strict=True):
        assert (out.float() - wanted).norm() <= 0.05 * wanted.norm()
    assert torch.dot(grads, exact) >= 0.98 * grads.norm() * exact.norm()
