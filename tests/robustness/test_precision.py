"""Extreme numbers and half precision: finite, and near single precision."""

import pytest
import torch

from mrla_mm import attention

from ..backbones.common import FAMILIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS = ("MRLALight", "MRLABase", "MLA", "LinearRLA")
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
BACKBONES = ["resnet18", "vit", "ceit", "pvtv2", "efficientnet"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_stays_finite(name, kind, dtype):
    """Two layers, with scores that saturate the gate or make the softmax choose one."""
    torch.manual_seed(0)
    module = getattr(attention, name)(8, head_channels=4).to(DEVICE, dtype)
    x = EXTREMES[kind](torch.randn(2, 8, 5, 7)).to(DEVICE, dtype).requires_grad_()
    out, memory = module(x, x)
    out, memory = module(out, x, memory)
    out.float().mean().backward()
    assert out.dtype == dtype and torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def outputs_and_gradients(model, x, context, loss_scale=1.0):
    model.zero_grad()
    with context:
        outs = model(x)
    (loss_scale * sum(out.float().square().mean() for out in outs)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: grad.float() / loss_scale for name, grad in grads.items()}
    return [out.float() for out in outs], grads


@pytest.mark.parametrize("variant", ["light", "base"])
@pytest.mark.parametrize("name", BACKBONES)
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
    wanted, exact = outputs_and_gradients(model, x, torch.autocast(DEVICE, enabled=False))
    for scale in LOSS_SCALES[dtype]:
        found, grads = outputs_and_gradients(model, x, torch.autocast(DEVICE, dtype=dtype), scale)
        if all(grad.isfinite().all() for grad in grads.values()):
            break
    assert grads.keys() == exact.keys()
    for a, b in zip(found, wanted, strict=True):
        assert torch.isfinite(a).all() and (a - b).norm() <= 0.05 * b.norm()
    a, b = (torch.cat([g.flatten() for g in group.values()]) for group in (grads, exact))
    assert torch.dot(a, b) >= 0.98 * a.norm() * b.norm(), "not finite, or it points elsewhere"
