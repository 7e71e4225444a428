"""Folded and Triton against the equations in float64: values, every gradient, every precision, awkward shapes."""

import functools
import importlib
import os
import re
import subprocess
import sys

import pytest
import torch

from mrla_mm.errors import InputError
from mrla_mm.ops import (
    Affine,
    LightWeights,
    choose_path,
    dispatch,
    folded,
    fused,
    light,
    light_block_end,
    operators,
    probe,
    weighted_sum,
)
from mrla_mm.ops.probe import try_triton, why_triton_fails

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPES = [(1, 24, 5, 7), (3, 20, 1, 9), (2, 48, 14, 13)]
INTERPRETED_SHAPES = [(2, 12, 1, 5), (1, 4, 33, 35)]  # the second needs several tiles
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="Triton needs a GPU or TRITON_INTERPRET=1; test_triton_interpreted runs these in a process of its own",
)
PATHS = ["folded", pytest.param("triton", marks=needs_triton)]
PATHS_AND_SHAPES = [("folded", shape) for shape in SHAPES] + [
    pytest.param("triton", shape, marks=needs_triton)
    for shape in (SHAPES if torch.cuda.is_available() else INTERPRETED_SHAPES)
]
LIGHT = {
    "full": {},
    "linear": dict(projection="linear"),
    "no history": dict(history=False),
    "lambda 1": dict(learned=False),
    "ungated": dict(gated=False),
    "identity value": dict(value=False),
    "identity value alone": dict(value=False, gated=False, learned=False),
}
# Its map kernels are light's, so that a few variants do for the slow interpreter.
BLOCK_ENDS = [("folded", variant) for variant in LIGHT] + [
    pytest.param("triton", variant, marks=needs_triton) for variant in ("full", "no history")
]
AFFINE = ["none", "frozen", "dropped"]
CONSTANT = {"keep"}  # what takes no gradient


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def draw_affine(kind, batch, channels):
    if kind == "none":
        return {}
    found = dict(scale=torch.randn(channels), offset=torch.randn(channels))
    return found | ({"keep": torch.arange(batch).remainder(2).add(0.25)} if kind == "dropped" else {})


def draw_light(shape, *, affine, projection="conv1d", history=True, learned=True, gated=True, value=True):
    """Named float64 tensors for one light attention with heads of 4 channels."""
    torch.manual_seed(0)
    channels = shape[1]
    found = dict(x=torch.randn(shape) + torch.randn(*shape[:2], 1, 1))
    found |= {"previous": torch.randn(shape)} if history else {}
    if gated:
        size = (1, 1, 5) if projection == "conv1d" else (channels, channels)
        found |= dict(query=torch.randn(size), key=torch.randn(size) * 0.5)
    found |= {"value": torch.randn(channels, 1, 3, 3)} if value else {}
    found |= {"history_scale": torch.randn(channels)} if history and learned else {}
    return {name: t.double() for name, t in (found | draw_affine(affine, *shape[:2])).items()}


def draw_block_end(shape, **options):
    """Named float64 tensors for the end of a block, none of whose sums is so near 0 that rounding decides about it."""
    tensors = draw_light(shape, **options)
    c, shortcut = tensors.pop("x"), torch.randn(shape).double()
    total = c + shortcut
    shortcut += torch.where(total.abs() < 0.2, 0.3 * total.sign(), 0)
    tensors.pop("previous", None)
    return dict(c=c, shortcut=shortcut) | tensors


def draw_sum(shape, *, depth, affine):
    """Named float64 tensors for a weighted sum with heads of 4 channels."""
    torch.manual_seed(0)
    found = dict(scores=torch.rand(shape[0], shape[1] // 4, depth))
    found |= {"x": torch.randn(shape)} if affine != "none" else {}
    found |= {f"value{s}": torch.randn(shape) for s in range(depth)}
    return {name: t.double() for name, t in (found | draw_affine(affine, *shape[:2])).items()}


def affine_of(t):
    return Affine(t["scale"], t["offset"], t.get("keep")) if "scale" in t else None


def weights_of(t):
    return LightWeights(*(t.get(name) for name in LightWeights._fields))


def run_light(t):
    return light(t["x"], t.get("previous"), weights_of(t), heads=t["x"].shape[1] // 4, affine=affine_of(t))


def run_block_end(t, history=True):
    options = dict(heads=t["c"].shape[1] // 4, affine=affine_of(t), history=history)
    return light_block_end(t["c"], t["shortcut"], weights_of(t), **options)


def run_sum(t):
    values = [value for name, value in t.items() if name.startswith("value")]
    return weighted_sum(t["scores"], values, x=t.get("x"), affine=affine_of(t))


def results(function, tensors, *, path, dtype, layout, monkeypatch):
    """Output and all gradients by one path; feature maps in dtype, parameters in at least float32."""
    monkeypatch.setenv("MRLA_OPS", path)
    leaves = {}
    for name, tensor in tensors.items():
        maps = tensor.dim() == 4 and tensor.shape[-1] > 1 and name != "value"
        leaf = tensor.to(device(), dtype if maps or dtype == torch.float64 else torch.float32)
        leaf = leaf.contiguous(memory_format=LAYOUTS[layout]) if maps else leaf
        leaves[name] = leaf.detach().requires_grad_(name not in CONSTANT)
    out = function(leaves)
    wanted = [name for name in leaves if name not in CONSTANT]
    torch.manual_seed(1)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(out)
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], cotangent)
    return {"output": out.detach()} | dict(zip(wanted, gradients, strict=True))


def compare(function, tensors, *, path, dtype, layout, monkeypatch):
    # The reference starts from what the path is given, so that rounding the input is nobody's error.
    maps = {name: t.to(dtype).double() if t.dim() == 4 and name != "value" else t for name, t in tensors.items()}
    expected = results(function, maps, path="reference", dtype=torch.float64, layout=layout, monkeypatch=monkeypatch)
    found = results(function, maps, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)
    assert found["output"].dtype == dtype
    assert found["output"].stride() == next(found[name] for name in ("x", "c", "value0") if name in found).stride()
    for name, wanted in expected.items():
        got = found[name].double()
        error = (got - wanted).norm() / wanted.norm().clamp_min(1e-3)
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


def slow(path, shape):
    return path == "triton" and INTERPRETED and shape[2] > 8


def dtypes_of(path):
    return [torch.float64] * (path == "folded") + [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill every buffer that the fused paths allocate with NaN, so that what nothing writes shows."""

    def poison(make):
        def call(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("variant", LIGHT)
def test_light_variants(variant, affine, layout, path, monkeypatch):
    tensors = draw_light((2, 12, 3, 4), affine=affine, **LIGHT[variant])
    dtype = torch.float64 if path == "folded" else torch.float32
    compare(run_light, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("path", "shape"), PATHS_AND_SHAPES, ids=str)
def test_light_precisions_and_shapes(shape, layout, path, monkeypatch):
    for affine in ("none", "dropped"):
        tensors = draw_light(shape, affine=affine)
        for dtype in dtypes_of(path)[: 1 if slow(path, shape) else None]:
            compare(run_light, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", AFFINE[1:])
@pytest.mark.parametrize(("path", "variant"), BLOCK_ENDS)
def test_block_end_variants(variant, affine, layout, path, monkeypatch):
    tensors = draw_block_end((2, 12, 3, 4), affine=affine, **LIGHT[variant])
    dtype = torch.float64 if path == "folded" else torch.float32
    run = functools.partial(run_block_end, history=variant != "no history")
    compare(run, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("path", "shape"), PATHS_AND_SHAPES[: len(SHAPES) + 1], ids=str)
def test_block_end_precisions_and_shapes(shape, layout, path, monkeypatch):
    tensors = draw_block_end(shape, affine="dropped")
    for dtype in dtypes_of(path)[: 1 if slow(path, shape) else None]:
        compare(run_block_end, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("path", PATHS)
def test_block_end_hides_no_nan(path, monkeypatch):
    """Else a loss would stay finite, and mmengine's CheckInvalidLossHook silent."""
    monkeypatch.setenv("MRLA_OPS", path)
    tensors = {name: t.float().to(device()) for name, t in draw_block_end((2, 12, 3, 4), affine="frozen").items()}
    tensors["c"][1, 5, 1, 2] = torch.nan
    out = run_block_end(tensors)
    assert out[1, 5, 1, 2].isnan() and not out[0].isnan().any()


@pytest.mark.parametrize("frozen", [("c",), ("shortcut",), LightWeights._fields], ids=str)
def test_block_end_gives_the_gradients_that_are_needed(frozen, monkeypatch):
    tensors = draw_block_end((2, 12, 3, 4), affine="frozen")
    gradients = {}
    for path in ("reference", "folded"):
        monkeypatch.setenv("MRLA_OPS", path)
        leaves = {name: t.clone().requires_grad_(name not in CONSTANT.union(frozen)) for name, t in tensors.items()}
        run_block_end(leaves).pow(2).sum().backward()
        gradients[path] = {name: leaf.grad for name, leaf in leaves.items()}
    for name, expected in gradients["reference"].items():
        assert (expected is None) == (name in CONSTANT.union(frozen))
        torch.testing.assert_close(gradients["folded"][name], expected, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize(("path", "shape"), PATHS_AND_SHAPES, ids=str)
def test_weighted_sum(shape, affine, layout, path, monkeypatch):
    several = dtypes_of(path)[: 1 if slow(path, shape) else None]
    for depth, dtypes in ((1, several[:1]), (11, several)):  # 11 values take the Triton kernels two launches
        tensors = draw_sum(shape, depth=depth, affine=affine)
        for dtype in dtypes:
            compare(run_sum, tensors, path=path, dtype=dtype, layout=layout, monkeypatch=monkeypatch)


def test_chunks_of_the_batch_are_all_computed(monkeypatch):
    monkeypatch.setattr(folded, "CHUNK_BYTES", 2 * 20 * 6 * 5 * 8)
    tensors = draw_light((5, 20, 6, 5), affine="dropped")
    assert [s.stop - s.start for s in folded.chunks(tensors["x"])] == [2, 2, 2]
    compare(run_light, tensors, path="folded", dtype=torch.float64, layout="contiguous", monkeypatch=monkeypatch)
    tensors = draw_block_end((5, 20, 6, 5), affine="dropped")
    for layout in LAYOUTS:
        compare(run_block_end, tensors, path="folded", dtype=torch.float64, layout=layout, monkeypatch=monkeypatch)
    tensors = draw_sum((5, 20, 6, 5), depth=3, affine="dropped")
    compare(run_sum, tensors, path="folded", dtype=torch.float64, layout="contiguous", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("path", "dtype"),
    [("folded", torch.bfloat16), ("folded", torch.float16), pytest.param("triton", torch.float16, marks=needs_triton)],
)
def test_small_weights_survive_beside_the_residual_in_half_precision(path, dtype, monkeypatch):
    """A branch worth 1/100 of x: weights folded into a centre tap of 1 would be rounded to a few values."""
    monkeypatch.setenv("MRLA_OPS", path)
    torch.manual_seed(0)
    x, value = torch.randn(2, 8, 6, 5).to(device(), dtype), torch.randn(8, 1, 3, 3).to(device())
    scale, offset = torch.full((8,), 3e-3).to(device()), torch.zeros(8).to(device())
    y = light(x, None, LightWeights(value=value), heads=1, affine=Affine(scale, offset)).double()
    branch = torch.nn.functional.conv2d(x.double(), value.double(), padding=1, groups=8) * scale[:, None, None].double()
    rounded = (x.double() + branch).to(dtype).double()
    assert (y - rounded).norm() < 0.5 * (rounded - x.double() - branch).norm()


@pytest.mark.parametrize("path", PATHS)
def test_maps_of_other_strides_and_precision_are_taken(path, monkeypatch):
    tensors = draw_light((2, 20, 4, 5), affine="frozen")
    expected = results(
        run_light, tensors, path="reference", dtype=torch.float64, layout="contiguous", monkeypatch=monkeypatch
    )["output"]
    monkeypatch.setenv("MRLA_OPS", path)
    odd = {name: t.float().to(device()) for name, t in tensors.items()}
    odd["x"] = odd["x"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    odd["previous"] = odd["previous"].double()
    torch.testing.assert_close(run_light(odd).double(), expected.to(device()), atol=1e-5, rtol=1e-5)


def test_gradcheck(monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    for function, tensors in (
        (run_light, draw_light((2, 4, 2, 3), affine="dropped")),
        (run_block_end, draw_block_end((2, 4, 2, 3), affine="dropped")),
        (run_sum, draw_sum((2, 4, 2, 3), depth=2, affine="dropped")),
    ):
        names = [name for name in tensors if name not in CONSTANT]
        keep = {name: tensor for name, tensor in tensors.items() if name in CONSTANT}
        leaves = tuple(tensors[name].requires_grad_() for name in names)
        call = lambda *values, f=function, k=keep, n=names: f(dict(zip(n, values, strict=True)) | k)  # noqa: E731
        assert torch.autograd.gradcheck(call, leaves, check_undefined_grad=False)


def test_second_derivative_raises(monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    tensors = draw_light((1, 4, 2, 3), affine="none")
    tensors["x"].requires_grad_()
    (first,) = torch.autograd.grad(run_light(tensors).pow(2).sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("function", "draw", "maps", "known"),
    [
        (run_light, draw_light, ("x", "previous"), [True, True]),
        (run_block_end, draw_block_end, ("c", "shortcut"), [False, True]),  # x, which c and the shortcut made
    ],
)
def test_two_maps_are_kept_and_nothing_else_of_their_size(function, draw, maps, known, monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "folded")
    drawn = draw((2, 20, 9, 8), affine="dropped")
    tensors = {name: t.requires_grad_(name not in CONSTANT) for name, t in drawn.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(tensors)
    large = [t for t in kept if t.numel() >= tensors[maps[0]].numel()]
    assert len(large) == 2
    assert [t.data_ptr() == tensors[name].data_ptr() for t, name in zip(large, maps, strict=True)] == known


@pytest.mark.parametrize("path", PATHS)
def test_each_path_runs_its_own_kernels(path, monkeypatch):
    """The dispatch's choice is what runs: the map functions of that path and of no other."""
    module = folded if path == "folded" else fused.kernels("triton")
    names, calls = {"light_forward", "light_sums", "light_backward", "sum_forward", "sum_backward"}, set()
    for name in names:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, n=name, **k: calls.add(n) or f(*a, **k))
    for function, tensors in (
        (run_light, draw_light((2, 20, 4, 5), affine="none")),
        (run_sum, draw_sum((2, 20, 4, 5), depth=2, affine="none")),
    ):
        dtype = torch.float32
        results(function, tensors, path=path, dtype=dtype, layout="contiguous", monkeypatch=monkeypatch)
        results(function, tensors, path="reference", dtype=dtype, layout="contiguous", monkeypatch=monkeypatch)
    assert calls == names


def test_the_reference_runs_without_the_fused_operators(monkeypatch):
    monkeypatch.setenv("MRLA_OPS", "reference")
    monkeypatch.setattr(operators, "fused", None)
    monkeypatch.setattr(operators, "block_end", None)
    run_light(draw_light((2, 20, 4, 5), affine="frozen"))
    run_block_end(draw_block_end((2, 20, 4, 5), affine="frozen"))
    run_sum(draw_sum((2, 20, 4, 5), depth=2, affine="frozen"))


def test_dispatch_gives_its_reasons(monkeypatch):
    x = torch.zeros(1, 4, 2, 2)
    monkeypatch.delenv("MRLA_OPS", raising=False)
    assert choose_path(x) == ("folded", "the tensor is not on a GPU")
    for path in ("reference", "folded"):
        monkeypatch.setenv("MRLA_OPS", path)
        assert choose_path(x) == (path, "MRLA_OPS asks for it")
    monkeypatch.setenv("MRLA_OPS", "fast")
    with pytest.raises(InputError, match="MRLA_OPS='fast' is unknown; use one of reference, folded, triton"):
        choose_path(x)
    monkeypatch.setenv("MRLA_OPS", "triton")
    with pytest.raises(InputError, match="MRLA_OPS=triton cannot run here: .*float64"):
        choose_path(x.double())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="MRLA_OPS=triton cannot run here: Triton does not run on cpu"):
        choose_path(x)
    monkeypatch.setenv("MRLA_OPS", "folded")
    with pytest.raises(InputError, match="no floating-point type"):
        choose_path(x.long())


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, to ask the dispatch where there is none."""

    device = torch.device("cuda")


def test_gpu_tensors_take_triton_where_it_can_run(monkeypatch):
    monkeypatch.delenv("MRLA_OPS", raising=False)
    gpu = torch.zeros(1, 4, 2, 2).as_subclass(OnGpu)
    monkeypatch.setattr("mrla_mm.ops.dispatch.HAS_TRITON", True)
    monkeypatch.setattr("mrla_mm.ops.dispatch.why_triton_fails", lambda device: "no C compiler")
    assert choose_path(gpu) == ("folded", "the Triton kernels do not work there")
    monkeypatch.setattr("mrla_mm.ops.dispatch.why_triton_fails", lambda device: "")
    assert choose_path(gpu) == ("triton", "the tensor is on a GPU")
    assert choose_path(gpu.double()) == ("folded", "the kernels do not compute in torch.float64")
    monkeypatch.setattr("mrla_mm.ops.dispatch.HAS_TRITON", False)
    assert choose_path(gpu) == ("folded", "Triton with torch >= 2.6 is not installed")


@needs_triton
def test_triton_programs_that_sum_several_tiles(monkeypatch):
    monkeypatch.setattr(fused.kernels("triton"), "PROGRAMS", 2)
    options = dict(path="triton", dtype=torch.float32, layout="contiguous", monkeypatch=monkeypatch)
    shape = (1, 3, 33, 35)
    compare(run_light, draw_light(shape, affine="frozen", gated=False), **options)
    compare(run_sum, draw_sum((1, 4, 33, 35), depth=2, affine="frozen"), **options)
    compare(run_block_end, draw_block_end((1, 4, 33, 35), affine="frozen"), **options)


@needs_triton
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1, 3, 9, 70), (2, 2, 17, 132), (1, 5, 1, 66), (1, 2, 20, 64)])
def test_triton_rows_of_several_tiles(shape, layout, monkeypatch):
    options = dict(path="triton", dtype=torch.float32, layout=layout, monkeypatch=monkeypatch)
    compare(run_light, draw_light(shape, affine="frozen", gated=False), **options)


@needs_triton
def test_kernels_are_tried_before_they_are_trusted(monkeypatch):
    """Right kernels pass; one that raises or miscomputes is found, named in a warning, and random states are kept."""
    kernels, here = fused.kernels("triton"), torch.device(device())
    state = torch.get_rng_state()
    assert try_triton.__wrapped__(here) == ""
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast(here.type, torch.bfloat16):  # the first step of a training in mixed precision
        assert try_triton.__wrapped__(here) == ""
    of_gate = fused.gate_kernels("triton", weights_of(draw_light((1, 4, 2, 2), affine="none")))
    wrongs = [(kernels, name, lambda found: found + 0.1) for name in ("pool", "light_forward", "sum_forward")]
    for name in ("activate", "block_backward"):
        wrongs.append((kernels, name, lambda found: (found[0] + 0.1, found[1])))
    wrongs.append((of_gate, "fold", lambda found: (found[0], found[1]._replace(taps=2 * found[1].taps))))
    wrongs.append((of_gate, "unfold", lambda found: (found[0] + 0.1, *found[1:])))
    for module, name, spoil in wrongs:
        good = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=good, s=spoil, **k: s(f(*a, **k)))
        with pytest.warns(UserWarning, match="folded path .*they compute wrong numbers"):
            assert try_triton.__wrapped__(here) == "they compute wrong numbers"
        monkeypatch.setattr(module, name, good)

    def no_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "light_sums", no_compiler)
    with pytest.warns(UserWarning, match="RuntimeError: Failed to find C compiler"):
        assert "C compiler" in try_triton.__wrapped__(here)


@pytest.mark.filterwarnings("ignore:layer attention runs by its folded path")
@pytest.mark.skipif(not dispatch.HAS_TRITON, reason="the kernels need Triton and torch >= 2.6")
def test_a_compiler_asks_for_the_trial_and_does_not_trace_it(monkeypatch):
    """The trial compares numbers, where a graph would break."""
    tried = []
    monkeypatch.setattr(probe, "outcomes", lambda *args, f=probe.outcomes: tried.append(args) or f(*args))
    torch.compiler.reset()
    try_triton.cache_clear()
    compiled = torch.compile(lambda x: x + bool(why_triton_fails(x.device)), fullgraph=True, backend="eager")
    for size in (3, 4):
        compiled(torch.zeros(size, device=device()))
    assert 1 <= len(tried) <= 2  # of Triton, and if that worked of what it is compared with
    try_triton.cache_clear()


SIGNATURES = {  # types of what a half-precision launch passes, by the names of a kernel's arguments
    "weights_ptr": "*fp32", "taps_ptr": "*fp32", "slope_ptr": "*fp32", "shift_ptr": "*fp32", "start_ptr": "*fp32",
    "by_taps_ptr": "*fp32", "by_slope_ptr": "*fp32", "by_shift_ptr": "*fp32", "sums_ptr": "*fp32",
}  # fmt: skip
FLAGS = dict(TAPS=9, FLIP=1, RESIDUAL=1, HISTORY=1, SHIFT=1, SCALED=1, COUNT=8, START=1, BLOCK_C=4, BLOCK_S=256)
FLAGS |= dict(MASK=1, POOL=1, K=5, VALUE=1, LEARNED=1, AFFINE=1, KEEP=1, BLOCK=32, BLOCK_B=16)
FLAGS |= dict(LAST=0, UNIT=4, BLOCK_W=128)
KERNELS = dict.fromkeys(["pool_kernel", "activate_kernel", "sum_kernel", "sum_backward_kernel"], "triton")
KERNELS |= dict.fromkeys(["apply_kernel", "sums_kernel"], "triton_stencil")
KERNELS |= dict.fromkeys(["fold_kernel", "ungate_kernel", "unfold_kernel"], "triton_gate")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_for_a_gpu(kernel):
    """Compile to PTX for compute capability 9.0, which needs no GPU: the interpreter accepts more than the compiler."""
    compiler = pytest.importorskip("triton.compiler", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    function = getattr(importlib.import_module(f"mrla_mm.ops.{KERNELS[kernel]}"), kernel)
    signature, constants = {"root": "fp32"} if "root" in function.arg_names else {}, {}
    for name in function.arg_names:
        if name in FLAGS:
            signature[name], constants[name] = "constexpr", FLAGS[name]
        elif name.endswith("_ptr") or name[1:].isdigit():
            signature[name] = "*fp32" if KERNELS[kernel] == "triton_gate" else SIGNATURES.get(name, "*fp16")
        elif name not in signature:
            signature[name] = "i32"
    places = enumerate(function.arg_names)
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in places if signature[name].startswith("*")}
    source = compiler.ASTSource(function, signature, constexprs=constants, attrs=aligned)
    ptx = compiler.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ".visible .entry" in ptx
    if KERNELS[kernel] == "triton_stencil":  # a unit of four columns in half precision, eight bytes, at a time
        assert re.search(r"ld\.global[.\w]*\.v2\.b32", ptx)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="this process runs the Triton tests itself")
def test_triton_interpreted():
    """Run this folder's Triton tests through Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        "triton and not interpreted",
        os.path.dirname(__file__),
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]


def test_triton_launches_leave_the_grid_open():
    """With symbolic shapes no side of the grid becomes a constant: torch.compile would compile for each anew."""
    pytest.importorskip("triton")
    from torch.fx.experimental.proxy_tensor import make_fx

    from mrla_mm.ops.triton_stencil import rowwise

    seen = []
    make_fx(lambda x: seen.append((x.shape, rowwise(x)[0])) or x, tracing_mode="symbolic")(torch.empty(2, 24, 100, 152))
    shape, arguments = seen[0]
    assert arguments["UNIT"] == 8
    assert [side.node.maybe_as_int() for side in (*shape[2:], arguments["units"])] == [None] * 3
