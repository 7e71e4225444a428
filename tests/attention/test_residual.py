"""The residual branch: how much is fused, the same values on every path, users' variants."""

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

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual, choose_fusion
from mrla_mm.attention.softmax import MLA as MLAClass
from mrla_mm.attention.softmax import MRLABase
from mrla_mm.errors import InputError
from mrla_mm.ops import softmax_scores, weighted_sum

from ..backbones.common import OwnAttention
from ..ops.cases import needs_numba
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


def run(stage, x, shortcut, call=call):
    memory = ()
    for branch in stage:
        x, *memory = call(branch.forward_add_relu, x, shortcut, nn.ReLU(), *memory)
        shortcut = shortcut * 0.5
    return x


def gradients(stage, path, monkeypatch, call=call):
    monkeypatch.setenv("MRLA_OPS", path)
    torch.manual_seed(1)
    x, shortcut = (draw_map(4).requires_grad_() for _ in range(2))
    stage = copy.deepcopy(stage)
    out = run(stage, x, shortcut, call)
    (out**2).sum().backward()
    found = dict(out=out.detach(), x=x.grad, shortcut=shortcut.grad)
    found |= stage.named_buffers() if not isinstance(call, partial) else ()
    return found | {name: parameter.grad for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize(("call", "drop_path"), [(call, 0.0), (recompute, 0.5), (reentrant, 0.5)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fusing_and_checkpointing_change_no_value_and_no_gradient(
    variant, norm, call, drop_path, monkeypatch
):
    stage = make_stage(variant, norm, drop_path=drop_path)
    expected = gradients(stage, "naive", monkeypatch)
    found = gradients(stage, "fused", monkeypatch, call)
    expected = {name: expected[name] for name in found}  # a recomputed norm counts batches twice
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


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
def test_compilers_and_function_transforms_see_plain_operators(variant, norm, monkeypatch):
    torch.compiler.reset()
    stage = make_stage(variant, norm, depth=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = gradients(stage, "naive", monkeypatch)
    monkeypatch.delenv("MRLA_OPS")
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
        assert "PythonOp" not in str(traced.graph)
        torch.testing.assert_close(traced(x), run(stage, x, x))


def extent(branch, **options):
    return choose_fusion(branch, draw_map(), **options).extent


@pytest.mark.parametrize(
    ("variant", "norm", "wanted"),
    [
        ("light", "frozen", "branch"),
        ("base (a)", "frozen", "branch"),
        ("light", "frozen without scale", "branch"),
        ("light", "batch statistics", "branch"),
        ("base (a)", "batch statistics", "branch"),
        ("light", "frozen SyncBN", "attention"),
        ("light", "GN", "attention"),
        ("light, last output", "frozen", "attention"),
        ("light, linear reduced (d)", "frozen", "nothing"),
        ("light, GELU", "frozen", "nothing"),
        ("base, identity value", "frozen", "nothing"),
        ("MLA (a)", "frozen", "branch"),
        ("MLA (a)", "batch statistics", "branch"),
        ("MLA, GELU", "frozen", "nothing"),
        ("DLA", "frozen", "branch"),
        ("DLA", "batch statistics", "branch"),
    ],
)
def test_how_much_is_fused(variant, norm, wanted, monkeypatch):
    branch = make_stage(variant, norm)[1]
    assert extent(branch) == wanted
    monkeypatch.setenv("MRLA_OPS", "naive")
    assert extent(branch) == "nothing"


def test_other_activations_dtypes_and_drop_paths_are_not_fused_away():
    branch, x, relu6 = make_stage()[0], draw_map(), nn.ReLU6()
    assert extent(branch, shortcut=x, relu=nn.ReLU()) == "all"
    assert extent(branch, shortcut=x, relu=relu6) == "branch"
    assert extent(branch, shortcut=x.float(), relu=nn.ReLU()) == "branch"
    torch.testing.assert_close(branch.forward_add_relu(x, x, relu6), branch(relu6(x + x), x))
    branch.drop_path = nn.Dropout(0.5)
    assert extent(branch) == "attention"
    branch.drop_path = nn.Identity()
    branch.activation = nn.Sigmoid()  # put behind the norm of a built model
    assert extent(branch) == "attention"
    branched = branch.norm(branch.attention(x, x)[0]).sigmoid()
    torch.testing.assert_close(branch(x, x)[0], x + branched)
    with pytest.raises(ValueError, match="more than 1 value"):  # torch's
        make_stage(norm="batch statistics")[0](draw_map(1)[..., :1, :1], None)


@pytest.mark.parametrize("dropping", [True, False])
def test_drop_path_follows_its_own_mode(dropping, monkeypatch):
    branch = make_stage(drop_path=0.9, depth=1)[0].train(not dropping)
    branch.norm.eval()
    branch.drop_path.train(dropping)
    x = draw_map(batch=16)
    found = []
    for path in ("naive", "fused"):
        monkeypatch.setenv("MRLA_OPS", path)
        torch.manual_seed(1)
        found.append(branch(x, x)[0])
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


@pytest.mark.parametrize(("value", "convolutions"), [("dwconv", 1), ("dwconv_gelu", 3)])
def test_mla_runs_so_many_convolutions_in_its_third_layer(value, convolutions, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "naive")
    calls, stage = [], make_stage(dict(MLA, value=value))
    convolve = nn.Conv2d._conv_forward
    watched = lambda self, *given: calls.append(self) or convolve(self, *given)  # noqa: E731
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", watched)
    run(stage, draw_map(), draw_map())
    assert calls.count(stage[2].attention.value) == convolutions


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
    scores = softmax_scores(mla.project_query(averages[:, 2]), mla.project_keys(averages))
    torch.testing.assert_close(out, weighted_sum(scores, list(map(mla.project_value, maps))))
    image = maps[0][:1].contiguous(memory_format=torch.channels_last)
    assert weighted_sum(scores[:1], [image.view_as(image), image, image]).stride() == image.stride()


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
def test_a_changed_part_runs_as_it_is(variant, change, monkeypatch):
    """DeepLab changes dilations of a built model; whatever is not as built runs unfused."""
    if (variant, change) == ("MLA (a)", "query_and_key"):
        pytest.skip("MLA does not call it")
    stage = make_stage(variant)
    before = gradients(stage, "naive", monkeypatch)["out"]
    part, _, name = change.partition(",")[0].rpartition(".")
    for branch in stage:
        owner = branch.attention.get_submodule(part)
        if change in METHODS:
            setattr(owner, name, partial(METHODS[change], getattr(owner, name)))
        else:
            setattr(owner, name, CHANGES[change]().double())
    expected = gradients(stage, "naive", monkeypatch)
    assert not torch.allclose(expected["out"], before)
    torch.testing.assert_close(gradients(stage, "fused", monkeypatch), expected)


@pytest.mark.parametrize("weight", [None, "value", "query", "norm"])
@pytest.mark.parametrize("path", ["fused", pytest.param("numba", marks=needs_numba)])
def test_what_plain_pytorch_refuses_is_refused(path, weight, monkeypatch):
    branch = make_stage(depth=1)[0].float()
    if weight is None:
        branch.attention.value = projection()
    elif weight == "norm":  # in training torch's operator would write beyond the statistics
        branch.norm = nn.BatchNorm2d(1)
    else:
        part = getattr(branch.attention, weight)
        part.weight = nn.Parameter(part.weight[:1, :, :1])
    monkeypatch.setenv("MRLA_OPS", path)
    with pytest.raises(RuntimeError):
        branch(torch.randn(2, 12, 4, 5), None)


@pytest.mark.parametrize("name", ["forward", "attend", "activate"])
def test_a_branch_with_a_method_of_its_own_runs_as_it_is(name, monkeypatch):
    original = getattr(LayerAttentionResidual, name)

    def changed(self, *args):
        out = original(self, *args)
        return (3 * out[0], *out[1:]) if isinstance(out, tuple) else out.sin()

    stage = make_stage()
    for branch in stage:
        branch.__class__ = type("Own", (LayerAttentionResidual,), {name: changed})
    expected, found = (gradients(stage, path, monkeypatch) for path in ("naive", "fused"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)"])
@pytest.mark.parametrize("path", ["fused", pytest.param("numba", marks=needs_numba)])
def test_odd_strides_of_a_single_column_change_no_gradient(path, variant, monkeypatch):
    branch = make_stage(variant, "batch statistics", depth=1)[0].float()
    found = []
    for own in ("naive", path):
        monkeypatch.setenv("MRLA_OPS", own)
        torch.manual_seed(1)
        x = torch.randn(4, 50, 12).mT.unsqueeze(-1).requires_grad_()  # a sequence as a column
        y, *_ = branch(x, x * 0.5)
        found.append(torch.autograd.grad((y * torch.randn(y.shape)).sum(), x))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grid", [(1, 1), (1, 6)])
def test_a_shortcut_of_another_shape_is_one_to_all_paths(grid, monkeypatch):
    branch, outputs = make_stage(depth=1)[0], []
    x, shortcut = draw_map(), torch.randn(2, 12, *grid).double()
    for path in ("naive", "fused"):
        monkeypatch.setenv("MRLA_OPS", path)
        outputs.append((branch(x, shortcut), branch.forward_add_relu(x, shortcut, nn.ReLU())))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("variant", ["light", "base (a)"])
def test_a_block_end_leaves_what_enters_it_to_the_hooks_that_kept_it(variant):
    branch, c, shortcut = make_stage(variant, depth=1)[0], draw_map(), draw_map()
    given = c.clone()
    with torch.no_grad():
        y, *_ = branch.forward_add_relu(c, shortcut, nn.ReLU())
    assert torch.equal(c, given) and y.data_ptr() != c.data_ptr()


@pytest.mark.parametrize("variant", ["light", "base (a)", "light, identity value (c)"])
@pytest.mark.parametrize("path", ["naive", "fused"])
def test_a_map_of_double_precision_needs_such_weights(path, variant, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", path)
    x, branch = draw_map(), make_stage(variant, depth=1)[0].float()
    for autocast in (False, True):  # which leaves double precision alone
        amp = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with amp, pytest.raises(RuntimeError, match="(?i)type"):
            branch(x, x)


def test_autocast_takes_maps_of_half_precision_to_single_weights():
    branch, x = make_stage(depth=1)[0].float(), draw_map().bfloat16()
    assert choose_fusion(branch, x).extent == "nothing"
    with torch.autocast("cpu", torch.bfloat16):
        assert choose_fusion(branch, x).extent == "branch"
        assert branch(x, x)[0].dtype == torch.bfloat16


def test_a_value_that_somebody_else_adds_to_keeps_its_gradient(monkeypatch):
    """The sum hands one gradient to both its inputs; base adds to that of its values in place."""
    found = []
    for path in ("naive", "fused"):
        monkeypatch.setenv("MRLA_OPS", path)
        first, second = make_stage("base (a)", depth=2)
        torch.manual_seed(1)
        x, added = (draw_map(2).requires_grad_() for _ in range(2))
        y, keys, value = first(x, None)
        z, *_ = second(y, None, keys, value + added)
        found.append(torch.autograd.grad(z.square().sum(), (x, added)))
    torch.testing.assert_close(*found)


PARTS = ["attention", "attention.value", "attention.query", "norm", "drop_path"]
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
CASES = list(itertools.product(PARTS, HOOKS))
CASES += [("branch itself", "forward_hook"), ("relu", "forward_hook")]


def step(branch, relu):
    x = draw_map().requires_grad_()
    branch.forward_add_relu(x, x, relu)[0].sum().backward()


@pytest.mark.parametrize(("part", "hook"), CASES)
def test_a_hook_of_a_part_is_called(part, hook):
    branch, relu, calls = make_stage(drop_path=0.5, depth=1)[0], nn.ReLU(), []
    others = {"branch itself": branch, "relu": relu}
    module = others[part] if part in others else branch.get_submodule(part)
    getattr(module, f"register_{hook}")(lambda *_: calls.append(1))
    step(branch, relu)
    assert calls == [1]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_all_modules_is_called(hook):
    branch, called = make_stage(depth=1)[0], []
    register = getattr(nn.modules.module, f"register_module_{hook}")
    handle = register(lambda module, *_: called.append(module))
    step(branch, nn.ReLU())
    handle.remove()
    assert {branch, branch.norm, branch.attention, *branch.attention.children()} <= set(called)


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
