"""The residual branch: the values of its modules in turn, hooks and changes, users' variants."""

import copy
import itertools
from functools import partial

import pytest
import torch
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.registry import MODELS
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.attention.softmax import MLA as MLAClass
from mrla_mm.attention.softmax import MRLABase
from mrla_mm.errors import InputError
from mrla_mm.functional import expand_heads, softmax_scores, weighted_sum

from ..backbones.common import OwnAttention
from ..conftest import FLOAT16
from .stages import VARIANTS as NAMED


def squared(kind, method):
    """A subclass of a user's that overrides a method: what it returns is squared."""
    original = getattr(kind, method)
    return type("Squared", (kind,), {method: lambda self, x: original(self, x) ** 2})


SquaredMLA, SquaredBase = (squared(kind, "project_value") for kind in (MLAClass, MRLABase))
SquaredConv2d = squared(nn.Conv2d, "forward")
LIGHT, BASE = (dict(type=name, head_channels=4) for name in ("MRLALight", "MRLABase"))
VARIANTS = {
    name: dict(options, type=kind, head_channels=4) for name, (kind, options) in NAMED.items()
}
VARIANTS |= {
    "light, GELU": dict(LIGHT, value="dwconv_gelu"),
    "DLA": dict(type="mrla_mm.DLALight", head_channels=4, reduction=2),
    "a user's own": dict(type=OwnAttention, head_channels=4),
    "a user's subclass": dict(type=SquaredBase, head_channels=4),
}
NORMS = {
    "frozen": dict(type="BN"),
    "frozen without scale": dict(type="BN", affine=False),
    "batch statistics": dict(type="BN", momentum=0.3),
    "frozen SyncBN": dict(type="SyncBN"),
    "GN": dict(type="GN", num_groups=2),
}


def make_stage(variant="light", norm="frozen", *, depth=3, drop_path=0.0):
    torch.manual_seed(0)
    options = dict(norm_cfg=NORMS[norm], drop_path=drop_path, zero_init=False)
    cfg = VARIANTS[variant] if isinstance(variant, str) else variant
    stage = nn.ModuleList(
        LayerAttentionResidual(cfg, 12, first_in_stage=t == 0, **options) for t in range(depth)
    )
    for parameter in stage.parameters():
        nn.init.normal_(parameter)
    for branch in stage:
        if hasattr(branch.norm, "running_mean"):
            nn.init.normal_(branch.norm.running_mean)
            nn.init.uniform_(branch.norm.running_var, 0.5, 2)
            branch.norm.train(norm == "batch statistics")
    return stage.double()


def draw_map(batch=2):
    return torch.randn(batch, 12, 5, 6, dtype=torch.float64)


def call(function, *args):
    return function(*args)


recompute = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def in_steps(branch, x, shortcut, *memory):
    """A branch as its modules in turn."""
    out, memory = branch.attention(x, shortcut, memory)
    return (x + branch.drop_path(branch.norm(out)), *memory)


def run(stage, x, shortcut, call=call):
    memory = ()
    for branch in stage:
        x, *memory = call(branch, (x + shortcut).relu(), shortcut, *memory)
        shortcut = shortcut * 0.5
    return x


def run_in_steps(stage, x, shortcut):
    return run(stage, x, shortcut, call=lambda branch, *args: in_steps(branch, *args))


def gradients(stage, run=run, **options):
    torch.manual_seed(1)
    x, shortcut = (draw_map(4).to(stage[0].norm.weight).requires_grad_() for _ in range(2))
    stage = copy.deepcopy(stage)
    out = run(stage, x, shortcut, **options)
    (out**2).sum().backward()
    found = dict(out=out.detach(), x=x.grad, shortcut=shortcut.grad)
    found |= {} if options else stage.named_buffers()  # a recomputed norm counts batches twice
    return found | {name: parameter.grad for name, parameter in stage.named_parameters()}


MEMBERS = [(variant, norm) for variant in VARIANTS for norm in ("frozen", "batch statistics")]
MEMBERS += [("light", norm) for norm in ("frozen without scale", "frozen SyncBN", "GN")]


@pytest.mark.parametrize(("call", "drop_path"), [(call, 0.0), (recompute, 0.5), (reentrant, 0.5)])
@pytest.mark.parametrize(("variant", "norm"), MEMBERS)
def test_a_branch_is_its_modules_in_turn_checkpointed_or_not(variant, norm, call, drop_path):
    stage = make_stage(variant, norm, drop_path=drop_path)
    expected = gradients(stage, run_in_steps)
    found = gradients(stage) if drop_path == 0 else gradients(stage, call=call)
    expected = {name: expected[name] for name in found}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)", "DLA", "light, GELU"])
def test_a_frozen_branch_in_other_precisions_is_near_double(variant, dtype, layout):
    """Single precision takes a kernel for each sample, which double precision on a CPU does not."""
    branch = make_stage(variant, depth=1)[0]
    maps = [draw_map().to(dtype).double().requires_grad_() for _ in range(2)]
    probe = torch.randn(maps[0].shape, dtype=torch.float64)
    exact, *_ = in_steps(branch, *maps)
    leaves = [*maps, *branch.parameters()]
    exact_grads = torch.autograd.grad((exact * probe).sum(), leaves, materialize_grads=True)
    branch = branch.to(dtype)
    maps = [m.detach().to(dtype).contiguous(memory_format=layout).requires_grad_() for m in maps]
    y, *_ = branch(*maps)
    assert y.dtype == dtype and y.is_contiguous(memory_format=layout)
    leaves = [*maps, *branch.parameters()]
    grads = torch.autograd.grad((y * probe.to(dtype)).sum(), leaves, materialize_grads=True)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    for found, wanted in zip((y, *grads), (exact, *exact_grads), strict=True):
        assert (found.double() - wanted).norm() <= tolerance * wanted.norm().clamp_min(0.1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["MRLALight", "MRLABase", "MLA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT16])
def test_a_deep_stage_in_half_precision_is_as_exact_as_its_modules(kind, dtype):
    """A branch worth a tenth of x: what is summed onto x is rounded to the size of x."""
    stage = make_stage(dict(type=kind, head_channels=4), depth=12)
    for branch in stage:
        branch.norm.weight.uniform_(0.05, 0.1)
        branch.norm.running_mean.zero_()
        branch.norm.bias.zero_()
    maps = [draw_map().to(dtype) for _ in stage]

    def last_branch(stage, call):
        memory = ()
        for branch, each in zip(stage, maps, strict=True):
            x = each.to(branch.norm.weight.dtype)
            y, *memory = call(branch, x, x, *memory)
        return y.double() - maps[-1].double()

    expected = last_branch(stage, in_steps)
    stage = stage.to(dtype)
    error, error_in_steps = (
        (last_branch(stage, each) - expected).norm() for each in (call, in_steps)
    )
    assert error < 1.2 * error_in_steps


def test_autocast_leaves_queries_and_keys_in_single_precision():
    torch.manual_seed(0)
    attention = MODELS.build(dict(type="MRLALight", channels=64))
    x = torch.randn(2, 64, 5, 6) + 3
    expected = attention.query_and_key(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.query_and_key(x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
def test_odd_strides_of_a_single_column_change_no_gradient(variant):
    branch = make_stage(variant, "batch statistics", depth=1)[0].float()
    found = []
    for copied in (False, True):
        torch.manual_seed(1)
        x = torch.randn(4, 50, 12).mT.unsqueeze(-1).requires_grad_()  # a sequence as a column
        given = x.contiguous() if copied else x
        y, *_ = branch(given, given * 0.5)
        found.append(torch.autograd.grad((y * torch.randn(y.shape)).sum(), x))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
def test_nan_is_not_hidden_and_stays_in_its_sample(variant):
    branch, x = make_stage(variant, depth=1)[0].float(), draw_map().float()
    x[1, 5, 1, 2] = torch.nan
    x.requires_grad_()
    out = branch(x, x)[0]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out[1, 5, 1, 2].isnan() and grad[1, 5].isnan().any()
    assert not out[0].isnan().any() and not grad[0].isnan().any()


PARTS = ["", "attention", "attention.value", "norm", "drop_path"]
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


def step(branch):
    x = draw_map().requires_grad_()
    branch(x, x)[0].sum().backward()


@pytest.mark.parametrize(("part", "hook"), itertools.product(PARTS, HOOKS))
def test_a_hook_of_a_part_is_called(part, hook):
    branch, calls = make_stage(depth=1)[0], []
    module = branch.get_submodule(part)
    getattr(module, f"register_{hook}")(lambda *_: calls.append(1))
    step(branch)
    assert calls == [1]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_all_modules_is_called(hook):
    branch, called = make_stage(depth=1)[0], []
    register = getattr(nn.modules.module, f"register_module_{hook}")
    handle = register(lambda module, *_: called.append(module))
    step(branch)
    handle.remove()
    assert {branch, branch.norm, branch.attention, *branch.attention.children()} <= set(called)


class SigmoidNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).sigmoid()


class DoubledBase(MRLABase):
    """A subclass of a user's, with a forward and no `add_to`."""

    def forward(self, x, shortcut, memory=()):
        out, memory = super().forward(x, shortcut, memory)
        return 2 * out, memory


REPLACEMENTS = {
    "attention": lambda: DoubledBase(12, head_channels=4),
    "norm": lambda: SigmoidNorm(12),
    "drop_path": lambda: nn.AlphaDropout(0.5),
}


@pytest.mark.parametrize("part", REPLACEMENTS)
def test_a_replaced_part_of_a_branch_runs(part):
    branch = make_stage(BASE, depth=1)[0]
    setattr(branch, part, REPLACEMENTS[part]().double())
    branch.norm.eval()
    x, found = draw_map(), []
    for function in (branch, partial(in_steps, branch)):
        torch.manual_seed(1)
        found.append(function(x, x)[0])
    torch.testing.assert_close(*found)


def test_a_norm_of_other_channels_is_refused():
    branch = make_stage(depth=1)[0]
    branch.norm = nn.BatchNorm2d(1).double().eval()
    with pytest.raises(RuntimeError):
        branch(draw_map(), None)


def convolution(size=3, padding=1, groups=12, **options):
    return nn.Conv2d(12, 12, size, padding=padding, groups=groups, **dict(bias=False) | options)


VALUES = {
    "reflect": partial(convolution, padding_mode="reflect"),
    "enlarged": partial(convolution, 5, 2),
    "mixing channels": partial(convolution, groups=6),
    "dilated": partial(convolution, padding=2, dilation=2),
    "biased": partial(convolution, bias=True),
    "another class": lambda: SquaredConv2d(12, 12, 3, padding=1, groups=12, bias=False),
    "parametrised": lambda: parametrizations.weight_norm(convolution()),
}
METHODS = {  # patched on the instance
    "project_value": lambda original, x: 3 * original(x),
    "value._conv_forward": lambda original, *given: 3 * original(*given),
}


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
@pytest.mark.parametrize("change", [*VALUES, *METHODS])
def test_a_changed_value_runs_as_it_is(variant, change):
    """DeepLab changes dilations of a built model."""
    stage = make_stage(variant)
    before = gradients(stage)["out"]
    for branch in stage:
        if change in VALUES:
            branch.attention.value = VALUES[change]().double()
        else:
            part, _, name = change.rpartition(".")
            owner = branch.attention.get_submodule(part)
            setattr(owner, name, partial(METHODS[change], getattr(owner, name)))
    expected = gradients(stage, run_in_steps)
    assert not torch.allclose(expected["out"], before)
    torch.testing.assert_close(gradients(stage), expected)
    for branch in stage:  # in single precision a cheaper form could stand for the value
        branch.float()
    found, expected = gradients(stage)["out"], expected["out"].float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


NOT_LINEAR = {
    "overridden": lambda mla: setattr(mla, "__class__", SquaredMLA),
    "mixing heads": lambda mla: setattr(mla, "value", convolution(groups=2).double()),
    "another convolution": lambda mla: setattr(mla.value, "__class__", SquaredConv2d),
    "hook": lambda mla: mla.value.register_forward_hook(lambda module, given, out: out**2),
}


@pytest.mark.parametrize("change", NOT_LINEAR)
def test_mla_projects_each_map_by_a_value_that_is_not_linear(change):
    mla = make_stage("MLA (a)", depth=1)[0].attention
    NOT_LINEAR[change](mla)
    maps = [draw_map() for _ in range(3)]
    memory = torch.stack([x.mean((2, 3)) for x in maps[:2]], 1), *maps[:2]
    out, (averages, *_) = mla(maps[2], None, memory)
    keys = torch.stack([mla.project_key(averages[:, s]) for s in range(3)], 1)
    scores = softmax_scores(mla.project_query(averages[:, 2]), keys)
    weights = expand_heads(scores, 12)
    torch.testing.assert_close(out, weighted_sum(weights, list(map(mla.project_value, maps))))


class WithAddTo(OwnAttention):
    def add_to(self, x, shortcut, memory, scale, offset):
        out, memory = WithAddTo.forward(self, x, shortcut, memory)
        return x + scale[..., None, None] * out + offset[..., None, None], memory


class ChangedForward(WithAddTo):
    def forward(self, x, shortcut, memory=()):
        out, memory = super().forward(x, shortcut, memory)
        return 2 * out, memory


@pytest.mark.parametrize("kind", [WithAddTo, ChangedForward, DoubledBase])
def test_an_add_to_stands_for_the_forward_of_its_own_class_alone(kind):
    stage = make_stage(dict(type=kind, head_channels=4))
    torch.testing.assert_close(gradients(stage), gradients(stage, run_in_steps))


def test_variants_of_any_registry_and_scope():
    MMDET_MODELS.register_module(name="OwnAttention", module=OwnAttention, force=True)
    MODELS.register_module(name="SquaredBase", module=SquaredBase, force=True)
    by_scope = dict(type="OwnAttention", _scope_="mmdet")
    for cfg in (dict(type="mmdet.OwnAttention"), by_scope, dict(type=OwnAttention)):
        stage = make_stage(dict(cfg, head_channels=4))
        assert isinstance(stage[0].attention, OwnAttention)
    stage = make_stage(dict(type="SquaredBase", head_channels=4))
    assert isinstance(stage[0].attention, SquaredBase)
    with MODELS.switch_scope_and_registry("mmdet"), pytest.raises(KeyError, match="MRLAHeavy"):
        make_stage(dict(type="MRLAHeavy"))


@pytest.mark.parametrize(
    ("kind", "norm"), [(LayerAttentionResidual, "BN"), (TokenAttentionResidual, "LN")]
)
def test_the_scale_learns_whatever_the_config_says(kind, norm):
    branch = kind(LIGHT, 12, norm_cfg=dict(type=norm, requires_grad=False))
    assert all(parameter.requires_grad for parameter in branch.parameters())


class Unflat(nn.Module):
    """A variant whose memory checkpointing could not track."""

    def __init__(self, channels, first_in_stage, memory=None):
        super().__init__()
        self.left = memory

    def forward(self, x, shortcut, memory=()):
        return x, self.left


@pytest.mark.parametrize("memory", [None, (1,), [torch.zeros(1)], ((torch.zeros(1),),)], ids=str)
def test_a_memory_that_is_not_a_flat_tuple_of_tensors_is_refused(memory):
    branch = make_stage(dict(type=Unflat, memory=memory), depth=1)[0]
    with pytest.raises(InputError, match="memory that Unflat returns"):
        branch(draw_map(), draw_map())


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
def test_second_derivatives_and_forward_mode(variant):
    (branch,) = make_stage(variant, depth=1)
    x, shortcut = torch.randn(2, 2, 12, 4, 3).double()

    def attend(x):
        return branch(x, shortcut)[0]

    x.requires_grad_()
    torch.autograd.gradcheck(attend, x, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(attend, x, fast_mode=True)
