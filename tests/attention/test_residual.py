"""The residual branch computes the same whichever path runs, and folds only what it may."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mrla_mm.attention import LayerAttentionResidual, MRLABase, TokenAttentionResidual, build_layer_attention
from mrla_mm.errors import InputError
from mrla_mm.ops import fused

VARIANTS = {
    "light": dict(type="MRLALight", head_channels=4),
    "light, last output": dict(type="MRLALight", head_channels=4, previous="output"),
    "light, depthwise alone": dict(type="MRLALight", head_channels=4, previous="none", gated=False),
    "base": dict(type="MRLABase", head_channels=4),
    "MLA": dict(type="MLA", head_channels=4),
    "linear": dict(type="LinearRLA", head_channels=2),
}
NORMS = {
    "frozen": dict(type="BN"),
    "frozen without gradient": dict(type="BN", requires_grad=False),
    "frozen without scale": dict(type="BN", affine=False),
    "batch statistics": dict(type="BN"),
    "frozen SyncBN": dict(type="SyncBN"),
    "GN": dict(type="GN", num_groups=2),
}


def make_stage(variant="light", norm="frozen", *, depth=3, zero_init=False, drop_path=0.0):
    """Branches of one stage in float64 with statistics and parameters drawn anew, in training mode."""
    torch.manual_seed(0)
    options = dict(norm_cfg=NORMS[norm], drop_path=drop_path, zero_init=zero_init)
    stage = nn.ModuleList(
        LayerAttentionResidual(VARIANTS[variant], 12, first_in_stage=t == 0, **options) for t in range(depth)
    )
    for name, parameter in stage.named_parameters():
        if not (zero_init and name.endswith("norm.weight")):
            nn.init.normal_(parameter)
    for branch in stage:
        if hasattr(branch.norm, "running_mean"):
            nn.init.normal_(branch.norm.running_mean)
            nn.init.uniform_(branch.norm.running_var, 0.5, 2)
            branch.norm.train(norm == "batch statistics")
    return stage.double()


def test_the_scale_learns_whatever_the_config_says():
    """A scale that starts at zero and stays there would make the branch dead weight."""
    of_tokens = TokenAttentionResidual(VARIANTS["light"], 12, norm_cfg=dict(type="LN", requires_grad=False))
    for branch in (*make_stage(norm="frozen without gradient"), of_tokens):
        assert all(parameter.requires_grad for parameter in branch.parameters())


def run(stage, x, shortcut):
    memory = None
    for branch in stage:
        x, memory = branch(x, shortcut, memory)
    return x


def gradients(stage, *, path, monkeypatch, call=run):
    """Output of a stage and the gradients of its inputs and parameters."""
    monkeypatch.setenv("MRLA_OPS", path)
    torch.manual_seed(1)
    x, shortcut = (torch.randn(4, 12, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    stage = copy.deepcopy(stage)
    out = call(stage, x, shortcut)
    (out**2).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "shortcut": shortcut.grad}
    return found | {name: parameter.grad for name, parameter in stage.named_parameters()}


def assert_same(found, expected):
    for name, wanted in expected.items():
        assert (found[name] is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_folding_changes_no_value_and_no_gradient(variant, norm, monkeypatch):
    stage = make_stage(variant, norm)
    expected = gradients(stage, path="reference", monkeypatch=monkeypatch)
    assert_same(gradients(stage, path="folded", monkeypatch=monkeypatch), expected)


@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
@pytest.mark.parametrize("variant", ["light", "base"])
def test_drop_path_drops_the_same_samples(variant, norm, monkeypatch):
    stage = make_stage(variant, norm, drop_path=0.5)
    expected = gradients(stage, path="reference", monkeypatch=monkeypatch)
    assert_same(gradients(stage, path="folded", monkeypatch=monkeypatch), expected)
    kept = gradients(make_stage(variant, norm), path="folded", monkeypatch=monkeypatch)
    assert not torch.allclose(kept["out"], expected["out"])


@pytest.mark.parametrize("variant", ["light", "base"])
def test_a_fresh_branch_is_the_identity_to_the_bit_and_learns_its_scale(variant, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    stage = make_stage(variant, zero_init=True)
    for branch in stage:
        nn.init.zeros_(branch.norm.bias)
    x = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    out = run(stage, x, x)
    assert torch.equal(out, x)
    out.pow(3).sum().backward()
    assert all(branch.norm.weight.grad.abs().min() > 0 for branch in stage)


@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
@pytest.mark.parametrize("variant", ["light", "base"])
def test_checkpointing(variant, norm, monkeypatch):
    stage = make_stage(variant, norm, drop_path=0.5)

    def recomputed(stage, x, shortcut):
        memory = None
        for branch in stage:
            x, memory = checkpoint(branch, x, shortcut, memory, use_reentrant=False)
        return x

    expected = gradients(stage, path="folded", monkeypatch=monkeypatch)
    assert_same(gradients(stage, path="folded", monkeypatch=monkeypatch, call=recomputed), expected)


@pytest.mark.parametrize(("variant", "norm"), [("light", "frozen"), ("base", "frozen"), ("light", "batch statistics")])
def test_compiling_breaks_no_graph(variant, norm, monkeypatch):
    torch.compiler.reset()
    stage = make_stage(variant, norm, depth=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = gradients(stage, path="folded", monkeypatch=monkeypatch)
    assert_same(gradients(stage, path="folded", monkeypatch=monkeypatch, call=compiled), expected)


@pytest.mark.parametrize("variant", ["light", "base"])
def test_autocast(variant, monkeypatch):
    """As in a detector under AMP: maps in bfloat16, parameters in float32."""
    stage = make_stage(variant).float()
    monkeypatch.setenv("MRLA_OPS", "folded")
    x = torch.randn(2, 12, 5, 6)
    expected = run(stage, x, x)
    half = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(stage, half, half)
    assert out.dtype == torch.bfloat16
    assert (out - expected).norm() < 0.03 * expected.norm()
    out.float().sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in stage.parameters())


def count_folded(stage, monkeypatch):
    """How many residual branches of a stage ran folded into their attention."""
    monkeypatch.setenv("MRLA_OPS", "folded")
    seen = []
    light, weighted_sum = fused.light, fused.weighted_sum
    count = lambda f: lambda *a, affine, **k: seen.append(affine is not None) or f(*a, affine=affine, **k)  # noqa: E731
    monkeypatch.setattr(fused, "light", count(light))
    monkeypatch.setattr(fused, "weighted_sum", count(weighted_sum))
    run(stage, *(torch.randn(2, 12, 5, 6, dtype=torch.float64) for _ in range(2)))
    return sum(seen)


@pytest.mark.parametrize(
    ("variant", "norm", "folds"),
    [
        ("light", "frozen", 3),
        ("base", "frozen", 3),
        ("MLA", "frozen", 3),
        ("light", "frozen without scale", 3),
        ("light", "batch statistics", 0),
        ("light", "frozen SyncBN", 0),
        ("light", "GN", 0),
        ("light, last output", "frozen", 0),
        ("linear", "frozen", 0),
    ],
)
def test_only_frozen_batch_norms_are_folded(variant, norm, folds, monkeypatch):
    assert count_folded(make_stage(variant, norm), monkeypatch) == folds


@pytest.mark.parametrize("listened", ["norm", "attention"])
def test_hooks_see_what_they_listen_to(listened, monkeypatch):
    stage = make_stage()
    heard = []
    getattr(stage[1], listened).register_forward_hook(lambda module, args, out: heard.append(out))
    assert count_folded(stage, monkeypatch) == 2
    assert len(heard) == 1


def test_tracing_sees_plain_operators(monkeypatch):
    monkeypatch.delenv("MRLA_OPS", raising=False)
    stage = make_stage().eval().requires_grad_(False)
    x = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    traced = torch.jit.trace(lambda x: run(stage, x, x), x, check_trace=False)
    assert "PythonOp" not in str(traced.graph)
    torch.testing.assert_close(traced(x), run(stage, x, x))


@pytest.mark.parametrize("path", ["reference", "folded"])
@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
@pytest.mark.parametrize("module", ["norm", "drop_path"])
def test_what_a_listener_heard_stays_as_it_was(module, norm, path, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", path)
    stage, heard = make_stage(norm=norm, drop_path=0.5), []
    getattr(stage[1], module).register_forward_hook(lambda *a: heard.append((a[2].detach(), a[2].detach().clone())))
    x = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    run(stage, x, x)
    ((shared, copied),) = heard
    assert shared.shape == x.shape
    assert torch.equal(shared, copied)


@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("module", ["norm", "attention", "drop_path"])
def test_listeners_of_gradients_hear_the_same_on_every_path(module, register, norm, monkeypatch):
    stage, heard = make_stage(norm=norm), []
    for path in ("reference", "folded"):
        branch = copy.deepcopy(stage)
        getattr(getattr(branch[1], module), register)(lambda *a: heard.append(a[-1][0].clone()))
        monkeypatch.setenv("MRLA_OPS", path)
        torch.manual_seed(1)
        x = torch.randn(2, 12, 5, 6, dtype=torch.float64, requires_grad=True)
        run(branch, x, x).pow(2).sum().backward()
    torch.testing.assert_close(*heard)


def test_a_variant_may_be_given_as_a_class():
    """As configs that import what they name do; saved by mmengine, they have the full path of the class."""
    for kind in ("MRLABase", MRLABase, "mrla_mm.attention.MRLABase", f"{MRLABase.__module__}.MRLABase"):
        assert type(build_layer_attention(dict(type=kind, head_channels=4), 12)) is MRLABase
    for kind in (nn.Conv2d, "torch.nn.Conv2d", "mrla_mm.attention.MRLABas", ".MRLABase", None):
        with pytest.raises(InputError, match="is no variant of layer attention"):
            build_layer_attention(dict(type=kind), 12)
