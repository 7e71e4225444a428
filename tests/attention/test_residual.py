"""The residual branch: the values of its modules in turn, hooks and changes, users' variants."""

import copy
import itertools
from functools import partial

import pytest
import torch
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.registry import MODELS
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.attention.softmax import MLA as MLAClass
from mrla_mm.attention.softmax import MRLABase
from mrla_mm.errors import InputError
from mrla_mm.functional import expand_heads, softmax_scores, weighted_sum

from ..backbones.common import OwnAttention
from .stages import VARIANTS as NAMED
from .stages import assert_same


def squared(kind, method):
    """A subclass of a user's that overrides a method: what it returns is squared."""
    original = getattr(kind, method)
    return type("Squared", (kind,), {method: lambda self, x: original(self, x) ** 2})


SquaredMLA, SquaredBase = (squared(kind, "project_value") for kind in (MLAClass, MRLABase))
SquaredConv2d = squared(nn.Conv2d, "forward")
LIGHT, BASE, MLA = (dict(type=f, head_channels=4) for f in ("MRLALight", "MRLABase", "MLA"))
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
    "cumulative average": dict(type="BN", momentum=None),
    "frozen SyncBN": dict(type="SyncBN"),
    "GN": dict(type="GN", num_groups=2),
}


def make_stage(variant="light", norm="frozen", *, depth=3, zero_init=False, drop_path=0.0):
    torch.manual_seed(0)
    options = dict(norm_cfg=NORMS[norm], drop_path=drop_path, zero_init=zero_init)
    cfg = VARIANTS[variant] if isinstance(variant, str) else variant
    stage = nn.ModuleList(
        LayerAttentionResidual(cfg, 12, first_in_stage=t == 0, **options) for t in range(depth)
    )
    for name, parameter in stage.named_parameters():
        if not (zero_init and name.endswith("norm.weight")):
            nn.init.normal_(parameter)
    for branch in stage:
        if hasattr(branch.norm, "running_mean"):
            nn.init.normal_(branch.norm.running_mean)
            nn.init.uniform_(branch.norm.running_var, 0.5, 2)
            branch.norm.train(norm in ("batch statistics", "cumulative average"))
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


@pytest.mark.parametrize(("call", "drop_path"), [(call, 0.0), (recompute, 0.5), (reentrant, 0.5)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_branch_is_its_modules_in_turn_checkpointed_or_not(variant, norm, call, drop_path):
    stage = make_stage(variant, norm, drop_path=drop_path)
    expected = gradients(stage, run_in_steps)
    found = gradients(stage) if drop_path == 0 else gradients(stage, call=call)
    expected = {name: expected[name] for name in found}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize(
    ("kind", "norm"), [(LayerAttentionResidual, "BN"), (TokenAttentionResidual, "LN")]
)
def test_the_scale_learns_whatever_the_config_says(kind, norm):
    branch = kind(LIGHT, 12, norm_cfg=dict(type=norm, requires_grad=False))
    assert all(parameter.requires_grad for parameter in branch.parameters())


@pytest.mark.parametrize(
    ("variant", "norm"),
    [*[(f, "frozen") for f in ("light", "base (a)", "MLA (a)")], ("light", "batch statistics")],
)
def test_compilers_and_function_transforms(variant, norm):
    torch.compiler.reset()
    stage = make_stage(variant, norm, depth=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = gradients(stage)
    torch.manual_seed(1)
    x, shortcut = (draw_map(4) for _ in range(2))
    torch.testing.assert_close(compiled(stage, x, shortcut), expected["out"])
    stage.requires_grad_(False)
    # torch.func.grad refuses batch norms that update their statistics
    for branch in stage:
        branch.norm.track_running_stats = norm != "batch statistics"
    by_func = torch.func.grad(lambda x: run(stage, x, shortcut).square().sum())(x)
    if norm == "frozen":
        torch.testing.assert_close(by_func, expected["x"])
        traced = torch.jit.trace(lambda x: run(stage, x, x), x, check_trace=False)
        torch.testing.assert_close(traced(x), run(stage, x, x))


def test_activations_and_drop_paths_put_behind_the_norm_run():
    branch, x = make_stage()[0], draw_map()
    branch.activation = nn.Sigmoid()
    branched = branch.norm(branch.attention(x, x)[0]).sigmoid()
    torch.testing.assert_close(branch(x, x)[0], x + branched)
    branch.drop_path = nn.Dropout(1.0)
    assert torch.equal(branch(x, x)[0], x)
    with pytest.raises(ValueError, match="more than 1 value"):  # torch's
        make_stage(norm="batch statistics")[0](draw_map(1)[..., :1, :1], None)


@pytest.mark.parametrize("dropping", [True, False])
def test_drop_path_follows_its_own_mode(dropping):
    branch = make_stage(drop_path=0.9, depth=1)[0].train(not dropping)
    branch.norm.eval()
    branch.drop_path.train(dropping)
    x = draw_map(batch=16)
    found = []
    for function in (branch, partial(in_steps, branch)):
        torch.manual_seed(1)
        found.append(function(x, x)[0])
    torch.testing.assert_close(*found)
    dropped = (found[0] == x).flatten(1).all(1)
    assert dropped.any() == dropping


def test_forward_mode_differentiation():
    branch, x = make_stage(depth=1)[0].requires_grad_(False), draw_map()
    with forward_ad.dual_level():
        (y,) = branch(forward_ad.make_dual(x.clone(), torch.ones_like(x)), x)
        found = forward_ad.unpack_dual(y).tangent
    _, expected = torch.func.jvp(lambda c: branch(c, x)[0], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(found, expected)


class SigmoidNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).sigmoid()


@pytest.mark.parametrize("training", [True, False])
def test_a_subclass_of_batch_norm(training):
    branch = make_stage(depth=1)[0]
    branch.norm = SigmoidNorm(12).double().train(training)
    x = draw_map().requires_grad_()
    assert_same([branch(x, x)[0]], [x + branch.norm(branch.attention(x, x)[0])], dict(x=x))


def square_value(mla):
    mla.project_value = partial(lambda original, x: original(x) ** 2, mla.project_value)


NOT_LINEAR = {
    "overridden": lambda mla: setattr(mla, "__class__", SquaredMLA),
    "replaced on the instance": square_value,
    "mixing heads": lambda mla: setattr(mla, "value", value(groups=2).double()),
    "another convolution": lambda mla: setattr(mla.value, "__class__", SquaredConv2d),
    "hook": lambda mla: mla.value.register_forward_hook(lambda module, given, out: out**2),
    "GELU": lambda mla: setattr(mla, "value_gelu", True),
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
    image = maps[0][:1].contiguous(memory_format=torch.channels_last)
    summed = weighted_sum(weights[:1], [image.view_as(image), image, image])
    assert summed.stride() == image.stride()


class DoubledBase(MRLABase):
    """A subclass of a user's, with a forward and no `add_to`."""

    def forward(self, x, shortcut, memory=()):
        out, memory = super().forward(x, shortcut, memory)
        return 2 * out, memory


@pytest.mark.parametrize("part", ["the attention", "its class"])
def test_an_attention_that_is_replaced_runs_its_own_forward(part):
    branch = make_stage(BASE, depth=1)[0].eval()
    if part == "the attention":
        branch.attention = DoubledBase(12, head_channels=4).double()
    else:
        branch.attention.__class__ = DoubledBase
    x = draw_map()
    expected = x + branch.norm(branch.attention(x, x)[0])
    torch.testing.assert_close(branch(x, x)[0], expected)


def test_variants_of_any_registry_and_scope_compute_what_they_say():
    MMDET_MODELS.register_module(name="OwnAttention", module=OwnAttention, force=True)
    MODELS.register_module(name="SquaredBase", module=SquaredBase, force=True)
    by_scope = dict(type="OwnAttention", _scope_="mmdet")
    own = [dict(type="mmdet.OwnAttention"), by_scope, dict(type=OwnAttention)]
    for cfg in (*own, dict(type="SquaredBase")):
        stage = make_stage(dict(cfg, head_channels=4))
        assert isinstance(stage[0].attention, OwnAttention if cfg in own else SquaredBase)
        x = draw_map()
        expected, shortcut, memory = x, x, ()
        for branch in stage:
            expected = (expected + shortcut).relu()
            out, memory = branch.attention(expected, shortcut, memory)
            expected, shortcut = expected + branch.norm(out), shortcut * 0.5
        torch.testing.assert_close(run(stage, x, x), expected)
    with MODELS.switch_scope_and_registry("mmdet"), pytest.raises(KeyError, match="MRLAHeavy"):
        make_stage(dict(type="MRLAHeavy"))
    with pytest.raises(TypeError, match="channels"):
        make_stage(dict(type="MLA", channels=12))


def value(size=3, padding=1, groups=12, bias=False, **options):
    return nn.Conv2d(12, 12, size, padding=padding, groups=groups, bias=bias, **options)


def projection(size=3, padding=1, bias=False, **options):
    return nn.Conv1d(1, 1, size, padding=padding, bias=bias, **options)


CHANGES = {
    "value, reflect": partial(value, padding_mode="reflect"),
    "value, enlarged": partial(value, 5, 2),
    "value, mixing channels": partial(value, groups=6),
    "value, dilated": partial(value, padding=2, dilation=2),
    "value, biased": partial(value, bias=True),
    "value, another class": lambda: SquaredConv2d(12, 12, 3, padding=1, groups=12, bias=False),
    "query, biased": partial(projection, bias=True),
    "query, circular": partial(projection, padding_mode="circular"),
    "query, wrapped": lambda: nn.Sequential(projection(), nn.Tanh()),
    "key, dilated": partial(projection, padding=2, dilation=2),
    "key, enlarged": partial(projection, 7, 3),
}
METHODS = {  # patched on the instance
    "project_value": lambda original, x: 3 * original(x),
    "query_and_key": lambda original, x: [2 * part for part in original(x)],
    "project_query": lambda original, pooled: original(pooled) + 1,
    "value._conv_forward": lambda original, *given: 3 * original(*given),
}


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
@pytest.mark.parametrize("change", [*CHANGES, *METHODS])
def test_a_changed_part_runs_as_it_is(variant, change):
    """DeepLab changes dilations of a built model."""
    if (variant, change) == ("MLA (a)", "query_and_key"):
        pytest.skip("MLA does not call it")
    stage = make_stage(variant)
    before = gradients(stage)["out"]
    part, _, name = change.partition(",")[0].rpartition(".")
    for branch in stage:
        owner = branch.attention.get_submodule(part)
        if change in METHODS:
            setattr(owner, name, partial(METHODS[change], getattr(owner, name)))
        else:
            setattr(owner, name, CHANGES[change]().double())
    expected = gradients(stage, run_in_steps)
    assert not torch.allclose(expected["out"], before)
    torch.testing.assert_close(gradients(stage), expected)
    for branch in stage:  # in single precision a cheaper form could stand for the value
        branch.float()
    found, expected = gradients(stage)["out"], expected["out"].float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight", [None, "value", "query", "norm"])
def test_what_plain_pytorch_refuses_is_refused(weight):
    branch = make_stage(depth=1)[0].float()
    if weight is None:
        branch.attention.value = projection()
    elif weight == "norm":  # in training torch's operator would write beyond the statistics
        branch.norm = nn.BatchNorm2d(1)
    else:
        part = getattr(branch.attention, weight)
        part.weight = nn.Parameter(part.weight[:1, :, :1])
    with pytest.raises(RuntimeError):
        branch(torch.randn(2, 12, 4, 5), None)


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


@pytest.mark.parametrize("grid", [(1, 1), (1, 6)])
def test_a_shortcut_of_another_shape_is_broadcast(grid):
    branch = make_stage(depth=1)[0]
    x, shortcut = draw_map(), torch.randn(2, 12, *grid).double()
    torch.testing.assert_close(branch(x, shortcut), in_steps(branch, x, shortcut))
    branch, x, shortcut = branch.float(), x.float(), shortcut.float()
    torch.testing.assert_close(branch(x, shortcut), in_steps(branch, x, shortcut))


@pytest.mark.parametrize("variant", ["light", "base (a)", "light, identity value (c)"])
def test_a_map_of_double_precision_needs_such_weights(variant):
    x, branch = draw_map(), make_stage(variant, depth=1)[0].float()
    for autocast in (False, True):  # which leaves double precision alone
        amp = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with amp, pytest.raises(RuntimeError, match="(?i)type"):
            branch(x, x)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["MRLALight", "MRLABase", "MLA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


def test_autocast_takes_maps_of_half_precision_to_single_weights():
    branch, x = make_stage(depth=1)[0].float(), draw_map().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert branch(x, x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_a_value_that_others_use_too(dtype):
    """Of a sum with it, and of the value itself, in which both layers share."""
    found = []
    for function in (call, in_steps):
        first, second = make_stage("base (a)", depth=2).to(dtype)
        torch.manual_seed(1)
        x, added = (draw_map().to(dtype).requires_grad_() for _ in range(2))
        y, keys, value = function(first, x, None)
        z, *_ = function(second, y, None, keys, value + added)
        found.append(torch.autograd.grad((y * z).sum(), (x, added, value)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)", "linear RLA"])
@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
def test_second_derivatives(variant, norm):
    branch = make_stage(variant, norm, depth=1)[0]
    branch.norm.track_running_stats = norm == "frozen"
    x, shortcut = (torch.randn(2, 12, 2, 3).double().requires_grad_() for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda x, s: branch(x, s)[0], (x, shortcut))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_maps_of_every_sample_by_vmap_and_weights_by_functional_call(dtype):
    branch, x = make_stage(depth=1)[0].to(dtype).requires_grad_(False), draw_map(3).to(dtype)
    found = torch.func.vmap(lambda one: branch(one[None], one[None])[0][0])(x)
    torch.testing.assert_close(found, branch(x, x)[0])
    weights = {name: 2 * weight for name, weight in branch.named_parameters()}
    found = torch.func.functional_call(branch, weights, (x, x))[0]
    for parameter in branch.parameters():
        parameter.mul_(2)
    torch.testing.assert_close(found, branch(x, x)[0])


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
def test_tensors_saved_elsewhere_and_inference_mode(variant):
    stage = make_stage(variant).float()
    expected = gradients(stage)
    with torch.autograd.graph.save_on_cpu():
        assert_close = torch.testing.assert_close
        assert_close(gradients(stage), expected)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert_close(gradients(stage), expected)
    x = draw_map().float()
    with torch.inference_mode():
        found = run(stage, x, x)
    assert_close(found, run(stage, x, x))


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
@pytest.mark.parametrize("norm", ["frozen", "batch statistics"])
def test_nan_is_not_hidden_and_stays_in_its_sample(variant, norm):
    branch, x = make_stage(variant, norm, depth=1)[0].float(), draw_map().float()
    x[1, 5, 1, 2] = torch.nan
    x.requires_grad_()
    out = branch(x, x)[0]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out[1, 5, 1, 2].isnan() and grad[1, 5].isnan().any()
    if norm == "frozen":
        assert not out[0].isnan().any() and not grad[0].isnan().any()


PARTS = ["attention", "attention.value", "attention.query", "norm", "drop_path"]
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
CASES = list(itertools.product(PARTS, HOOKS))
CASES += [("", "forward_hook")]  # of the branch itself


def step(branch):
    x = draw_map().requires_grad_()
    branch(x, x)[0].sum().backward()


@pytest.mark.parametrize(("part", "hook"), CASES)
def test_a_hook_of_a_part_is_called(part, hook):
    branch, calls = make_stage(drop_path=0.5, depth=1)[0], []
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


class WithAddTo(OwnAttention):
    def add_to(self, x, shortcut, memory, scale, offset):
        out, memory = WithAddTo.forward(self, x, shortcut, memory)
        return x + scale[..., None, None] * out + offset[..., None, None], memory


class ChangedForward(WithAddTo):
    def forward(self, x, shortcut, memory=()):
        out, memory = super().forward(x, shortcut, memory)
        return 2 * out, memory


@pytest.mark.parametrize("kind", [WithAddTo, ChangedForward])
def test_a_users_own_add_to_stands_for_its_own_forward_alone(kind):
    stage = make_stage(dict(type=kind, head_channels=4))
    torch.testing.assert_close(gradients(stage), gradients(stage, run_in_steps))


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


def test_autocast_leaves_queries_and_keys_in_single_precision():
    torch.manual_seed(0)
    attention = MODELS.build(dict(type="MRLALight", channels=64))
    x = torch.randn(2, 64, 5, 6) + 3
    expected = attention.query_and_key(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.query_and_key(x)
    assert all(map(torch.equal, found, expected))
