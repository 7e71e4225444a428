"""Convolution and frozen norm as one convolution, against both step by step."""

import copy

import pytest
import torch
from torch import nn

from mrla_mm.backbones import MRLAResNet
from mrla_mm.backbones.conv_bn import MIN_NUMEL_TO_FOLD, can_fold_bn, conv_bn

CONVOLUTIONS = {
    "1x1": dict(kernel_size=1, bias=False),
    "strided": dict(kernel_size=3, stride=2, padding=1, bias=False),
    "dilated": dict(kernel_size=3, padding=2, dilation=2, bias=False),
    "grouped": dict(kernel_size=3, padding=1, groups=4, bias=False),
    "oblong": dict(kernel_size=(1, 3), stride=(1, 2), padding=(0, 1), bias=False),
    "with bias": dict(kernel_size=3, padding="same", padding_mode="circular"),
}


@pytest.fixture(autouse=True)
def folded(monkeypatch):
    """Take the folded path on a CPU, for maps however small."""
    monkeypatch.setenv("MRLA_OPS", "fused")
    monkeypatch.setitem(MIN_NUMEL_TO_FOLD, "cpu", 0)


def draw(options=None, **norm_options):
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 12, **(options or CONVOLUTIONS["strided"])).double()
    norm = nn.BatchNorm2d(12, **norm_options).double().eval()
    for tensor in (norm.running_mean, *norm.parameters()):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.1, 2)
    return conv, norm, torch.randn(2, 8, 19, 24).double()


def outcome(run, conv, norm, x):
    x = x.clone().requires_grad_()
    out = run(conv, norm, x)
    parameters = nn.Sequential(conv, norm).parameters()
    torch.manual_seed(1)
    leaves = [x, *(p for p in parameters if p.requires_grad)]
    return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))


def in_steps(conv, norm, x):
    return norm(conv(x))


def outcomes(*modules):
    return outcome(conv_bn, *modules), outcome(in_steps, *modules)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_values_and_gradients(kind, affine):
    conv, norm, x = draw(CONVOLUTIONS[kind], affine=affine)
    assert can_fold_bn(conv, norm, x)
    torch.testing.assert_close(*outcomes(conv, norm, x), rtol=1e-10, atol=1e-10)


def test_frozen_weights_take_no_gradient():
    conv, norm, x = draw()
    norm.requires_grad_(False)
    conv.weight.requires_grad_(False)
    torch.testing.assert_close(*outcomes(conv, norm, x))
    assert not conv_bn(conv, norm, x).requires_grad


def assert_as_exact(results, exact, factor, floor=0.0):
    for ours, theirs, wanted in zip(*results, exact, strict=True):
        errors = [(t.double() - wanted).norm() / wanted.norm() for t in (ours, theirs)]
        assert errors[0] < max(factor * errors[1], floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_less_precision_loses_no_more_than_step_by_step(autocast, dtype):
    conv, norm, x = draw(CONVOLUTIONS["grouped"])
    exact = outcome(in_steps, conv, norm, x)
    rough = torch.float32 if autocast else dtype
    conv, norm, x = conv.to(rough), norm.to(rough), x.to(rough)
    with torch.autocast("cpu", dtype, enabled=autocast):
        results = outcomes(conv, norm, x)
    assert results[0][0].dtype == results[1][0].dtype == dtype
    assert_as_exact(results, exact, 1.5, floor=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_norms_own_gradients_where_the_mean_is_large(autocast):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 12, 3, bias=False).double(), nn.BatchNorm2d(12).double().eval()
    x = torch.rand(2, 16, 40, 40).double()
    nn.init.uniform_(conv.weight, 0.0, 0.5)
    with torch.no_grad():
        variance, mean = torch.var_mean(conv(x), (0, 2, 3))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
    assert (norm.running_mean > 8 * norm.running_var.sqrt()).all()

    def gradients(run, dtype):
        rough = torch.float32 if autocast else dtype
        modules = [module.to(rough) for module in copy.deepcopy((conv, norm))]
        with torch.autocast("cpu", dtype, enabled=autocast and dtype is not torch.float64):
            out = run(*modules, x.to(rough))
        cotangent = torch.rand(out.shape, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad(out, list(modules[1].parameters()), cotangent.to(out.dtype))

    exact = gradients(in_steps, torch.float64)
    results = [gradients(run, torch.bfloat16) for run in (conv_bn, in_steps)]
    assert_as_exact(results, exact, 3)  # 18, if a bias of the convolution took the gradient


@pytest.mark.parametrize("change", ["training", "weight_norm", "spectral_norm"])
def test_batch_statistics_and_parametrized_weights_are_not_folded(change):
    conv, norm, x = draw()
    if change == "training":
        norm.train()
    else:
        getattr(nn.utils.parametrizations, change)(conv)
    twin = copy.deepcopy((conv, norm))
    torch.testing.assert_close(conv_bn(conv, norm, x), in_steps(*twin, x), rtol=0, atol=0)


def test_where_it_saves_nothing(monkeypatch):
    conv, norm, x = draw()
    assert not can_fold_bn(conv, norm, x[:, :, :5, :5])  # 216 elements, and 864 weights
    for minimum in (2592, 2593):
        monkeypatch.setitem(MIN_NUMEL_TO_FOLD, "cpu", minimum)
        assert can_fold_bn(conv, norm, x) is (minimum == 2 * 12 * 9 * 12)


@pytest.fixture
def backbone():
    attention = dict(type="MRLALight", head_channels=16)
    options = dict(base_channels=16, norm_eval=True, zero_init_attention=False)
    return MRLAResNet(50, attention, attention_drop_path=0.5, **options).double().train()


MRLA = ["mrla", "mrla.norm", "mrla.drop_path", "mrla.attention.value"]


@pytest.mark.parametrize("name", ["conv2", "bn3", "downsample", "relu", *MRLA])
def test_hooks_and_replaced_forwards_are_called(name, backbone):
    module, calls = backbone.layer1[0].get_submodule(name), []
    image = torch.randn(2, 3, 64, 64).double()
    forward = module.forward

    def run():
        torch.manual_seed(1)
        return backbone(image)

    expected = run()
    handle = module.register_forward_hook(lambda _, inputs, out: calls.append(inputs[0].shape[2:]))
    torch.testing.assert_close(run(), expected)
    handle.remove()
    module.forward = lambda x, *more: calls.append(x.shape[2:]) or forward(x, *more)
    torch.testing.assert_close(run(), expected)
    assert calls == [(16, 16)] * (6 if name == "relu" else 2)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_tracing_makes_no_choice_of_its_own(monkeypatch):
    monkeypatch.delenv("MRLA_OPS")
    conv, norm, x = draw()
    for module in (conv, norm):
        module.requires_grad_(False)  # a trace takes them for constants
    traced = torch.jit.trace(lambda x: conv_bn(conv, norm, x), x)
    torch.testing.assert_close(traced(x[:1]), in_steps(conv, norm, x[:1]))
