"""What mmengine, mmcv and torch can do to a module changes no number, half precision few."""

import copy
from functools import partial

import pytest
import torch
from mmcv.cnn import fuse_conv_bn
from mmengine.registry import MODELS
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from mrla_mm import attention
from mrla_mm.errors import InputError

from ..comparators.test_resnets import plugin
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
MEMBERS = [(family, variant) for family in FAMILIES for variant in VARIANTS]
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
def test_reentrant_checkpointing_of_blocks_branches_stages_and_all(name, variant):
    backbone = build(name, variant)
    levels, gradients = outputs_and_gradients(backbone)
    modules = dict(backbone.named_modules())
    blocks = [name for name in modules if hasattr(modules[name], "downsample")]
    blocks = blocks or [name for name in modules if hasattr(modules[name], "mrla")]
    parts = [name for name in modules if modules[name] in branches(backbone)]
    whole = [""] if name != "swin" else []  # it returns a list, which reentrant checkpoints lose
    stages = getattr(backbone, "res_layers", [])  # transformers have none
    if name == "efficientnet":
        stages = [f"layers.{i}" for i in range(1, 5)]
    for chosen in (blocks, parts, stages, whole):
        wrapped = nn.ModuleDict(dict(whole=copy.deepcopy(backbone)))
        names = [f"whole.{name}".removesuffix(".") for name in chosen]
        turn_on_activation_checkpointing(wrapped, names)
        found, found_gradients = outputs_and_gradients(wrapped.whole)
        torch.testing.assert_close(found, levels)
        error = (found_gradients - gradients).norm() / gradients.norm()
        assert error < 1e-9, (chosen[:1], error)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@torch.no_grad()
def test_fused_convolutions_and_norms(name):
    backbone = build(name, "base").eval()
    expected = backbone(draw_image(64, 64))
    torch.testing.assert_close(fuse_conv_bn(backbone)(draw_image(64, 64)), expected)


@pytest.mark.parametrize("name", ["resnet18", *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision(name, dtype):
    torch.manual_seed(0)
    kinds = OTHERS | dict(resnet18=dict(type="MRLAResNet", depth=18, zero_init_attention=False))
    backbone = MODELS.build(copy.deepcopy(kinds[name])).double().eval()
    expected = backbone(draw_image(64, 64))[-1]
    found = backbone.to(dtype)(draw_image(64, 64).to(dtype))[-1]
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("name", "variant"), [("resnet18", v) for v in VARIANTS] + MEMBERS[-len(OTHERS) :]
)
def test_symbolic_tracing(name, variant):
    backbone = build(name, variant)
    traced = torch.fx.symbolic_trace(backbone)
    found, gradients = outputs_and_gradients(traced)
    expected, expected_gradients = outputs_and_gradients(backbone)
    torch.testing.assert_close(found, expected)
    image = 2 * 3 * 64 * 64  # whose gradients come first; a graph orders parameters its own way
    torch.testing.assert_close(gradients[:image], expected_gradients[:image])


prune_half = partial(prune.l1_unstructured, name="weight", amount=0.5)
CHANGES = [prune_half, weight_norm, spectral_norm, parametrizations.weight_norm]
CHANGE_NAMES = ["pruning", "weight norm", "spectral norm", "parametrised weight norm"]


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_NAMES)
@pytest.mark.parametrize("variant", ["light", "base", "mla"])
def test_reparametrised_projections_train(variant, change, part):
    backbone = build("resnet18", variant)
    changed = [getattr(branch.attention, part) for branch in branches(backbone)]
    for module in changed:
        change(module)
    # a stage's first query and key have one layer to choose from, or their gate
    parameters = [p for module in changed[1::2] for p in module.parameters()]
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        outputs_and_gradients(backbone)
        optimizer.step()
    assert all((p != old).any() for p, old in zip(parameters, before, strict=True))
    found = outputs_and_gradients(backbone.eval())
    for branch in branches(backbone):  # a hook keeps the norm apart
        branch.norm.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(found, outputs_and_gradients(backbone))


def replace_forward(layer):
    layer.forward = layer.forward


CHANGES_OF_SHARED = {  # of DIA's cell, or of DLA-light's cell and convolution
    "prune": ("dia", lambda shared: prune_half(shared.lstm.from_input[0])),
    "replace": ("dia", lambda shared: setattr(shared.lstm.from_input, "0", nn.Identity())),
    "forward": ("dla", lambda shared: replace_forward(shared.attention.cell.from_input[0])),
    "context's forward": ("dla", lambda shared: replace_forward(shared.attention.context)),
    "dilate": ("dla", lambda shared: setattr(shared.attention.context, "dilation", (2, 2))),
    "pad": ("dla", lambda shared: setattr(shared.attention.context, "padding_mode", "reflect")),
}


@pytest.mark.parametrize(("name", "change"), CHANGES_OF_SHARED.values(), ids=CHANGES_OF_SHARED)
def test_changing_what_a_stage_shares_is_refused(name, change):
    backbone = build(name)
    change(backbone.layer1[0].mrla)
    with pytest.raises(InputError, match="share"):
        backbone(draw_image(64, 64))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("MRLALight", "MRLABase", "MLA", "LinearRLA")
HALVES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last][: 1 + (DEVICE == "cuda")]
# Tried until no gradient is too large for the type; without a scale fp16 turns EfficientNet's small
# ones into 0.
LOSS_SCALES = {torch.float16: (2.0**12, 2.0**8, 2.0**4, 1.0), torch.bfloat16: (1.0,)}
EXTREMES = {
    "zeros": lambda x: x * 0,
    "equal": lambda x: x * 0 + 3,
    "large": lambda x: x * 0 + 1e4,
    "negative": lambda x: x * 0 - 1e4,
    "both signs": lambda x: x.sign() * 1e4,
    "tiny": lambda x: x * 1e-7,
    "one spike": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 7, 3e4, 0.0),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("name", KINDS)
def test_attention_stays_finite(name, kind, dtype):
    torch.manual_seed(0)
    module = getattr(attention, name)(8, head_channels=4).to(DEVICE, dtype)
    x = EXTREMES[kind](torch.randn(2, 8, 5, 7)).to(DEVICE, dtype).requires_grad_()
    out, memory = module(x, x)
    out, memory = module(out, x, memory)
    out.float().mean().backward()
    assert out.dtype == dtype and torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def scaled_gradients(model, x, context, loss_scale=1.0):
    model.zero_grad()
    with context:
        outs = model(x)
    (loss_scale * sum(out.float().square().mean() for out in outs)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: grad.float() / loss_scale for name, grad in grads.items()}
    return [out.float() for out in outs], grads


@pytest.mark.parametrize("variant", ["light", "base"])
@pytest.mark.parametrize("name", ["resnet18", "vit", "ceit", "pvtv2", "efficientnet"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", HALVES[1:], ids=str)
def test_autocast_is_near_single_precision(dtype, layout, name, variant):
    torch.manual_seed(0)
    options = dict(arch="b0", out_indices=(2,)) if name == "efficientnet" else {}
    model = FAMILIES[name].mrla(variant, zero_init_attention=False, **options)
    model.init_weights()
    model.eval()  # batch statistics of a few pixels would magnify rounding
    model.to(DEVICE, memory_format=layout)
    x = torch.rand(2, 3, 64, 64, device=DEVICE).contiguous(memory_format=layout)
    wanted, exact = scaled_gradients(model, x, torch.autocast(DEVICE, enabled=False))
    for scale in LOSS_SCALES[dtype]:
        found, grads = scaled_gradients(model, x, torch.autocast(DEVICE, dtype=dtype), scale)
        if all(grad.isfinite().all() for grad in grads.values()):
            break
    assert grads.keys() == exact.keys()
    for a, b in zip(found, wanted, strict=True):
        assert torch.isfinite(a).all() and (a - b).norm() <= 0.05 * b.norm()
    a, b = (torch.cat([g.flatten() for g in group.values()]) for group in (grads, exact))
    assert a.isfinite().all() and torch.dot(a, b) >= 0.98 * a.norm() * b.norm()
