"""The fused paths against the equations in float64: values and gradients, dtypes, odd shapes."""

import functools
import itertools
import sys
from collections import Counter, defaultdict

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mrla_mm.errors import InputError
from mrla_mm.ops import base_fused, choose_path, dispatch, proof
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.proof import Form, Outcome

from .cases import (
    CONSTANT,
    DEVICE,
    DEVICES,
    EXTENTS,
    INTERPRETED,
    LAYOUTS,
    base,
    base_joined,
    draw,
    light,
    mla,
    mla_joined,
    needs_numba,
    needs_triton,
    parts,
    results,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SHAPES = [(1, 24, 5, 7), (3, 20, 1, 9), (2, 48, 14, 13)]
NUMBA = pytest.param("numba", marks=needs_numba)
TRITON = pytest.param("triton", marks=needs_triton)
PATHS = ["fused", NUMBA, TRITON]
# The second of those for the interpreter takes several tiles.
TRITON_SHAPES = SHAPES if DEVICES["triton"] == "cuda" else [(2, 12, 1, 5), (1, 4, 33, 35)]
NUMBA_SHAPES = [*SHAPES, (2, 8, 1, 1), (1, 12, 6, 1), (2, 4, 3, 1100), (1, 4, 40, 37)]
PATHS_AND_SHAPES = [("fused", shape) for shape in SHAPES]
PATHS_AND_SHAPES += [pytest.param("numba", shape, marks=needs_numba) for shape in NUMBA_SHAPES]
PATHS_AND_SHAPES += [pytest.param("triton", shape, marks=needs_triton) for shape in TRITON_SHAPES]
LIGHT = {
    "full": {},
    "no drop path": dict(keep=False),
    "no history": dict(history=False),
    "unused lambda": {},
    "lambda 1": dict(learned=False),
    "ungated": dict(gated=False),
    "identity value": dict(value=False),
    "identity value alone": dict(value=False, gated=False, learned=False),
}
# The interpreter is slow: there, all variants at the end of a block, and the full one wherever it
# can stand.
CASES = list(itertools.product(EXTENTS, LIGHT))
VARIANTS = [("fused", *case) for case in CASES]
VARIANTS += [pytest.param("numba", *case, marks=needs_numba) for case in CASES]
VARIANTS += [
    pytest.param("triton", extent, variant, marks=needs_triton)
    for extent, variant in CASES
    if extent == "block end" or variant == "full"
]


def assert_same(function, tensors, *, path, dtype, layout="contiguous"):
    # The reference starts from what the path is given: rounding the input is nobody's error.
    rounded = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 4 and name != "value":
            rounded[name] = tensor.to(dtype).double()
    naive, fused = (functools.partial(function, path=way) for way in ("naive", path))
    expected = results(naive, rounded, dtype=torch.float64, layout=layout, device=DEVICES[path])
    computed = results(fused, tensors, dtype=dtype, layout=layout, device=DEVICES[path])
    assert computed["output"].dtype == dtype
    assert computed["output"].stride() == computed["c"].stride()
    for name, wanted in expected.items():
        if wanted is None:  # a key that nothing asks for
            assert computed[name] is None or not computed[name].any(), name
            continue
        error = (computed[name].double() - wanted).norm() / wanted.norm().clamp_min(1e-1)
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


def dtypes_of(path):
    if path == "numba":
        return [torch.float32]
    return [torch.float64] * (path == "fused") + [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill every buffer that the fused paths allocate with NaN, to show what nothing writes."""

    def poison(make):
        def call(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    for path in ("numba", "triton"):  # naive would run, and pass, where the self-check fails
        monkeypatch.delitem(proof.SELF_CHECKS, path, raising=False)
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.fixture(autouse=INTERPRETED and DEVICE == "cpu")
def apart(monkeypatch):
    """Fail where a kernel leaves its tensors, reads an element that it stores, or stores one twice.

    A GPU runs programs and their warps at once; the interpreter runs one at a time and hides races.
    A program of `some_values_backward_kernel` may read what it stores: it adds to it in place.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    loaded, stored = defaultdict(list), defaultdict(list)  # addresses by program
    run = GridExecutor.__call__

    def watch(name, touched, mask_place):
        access = getattr(InterpreterBuilder, name)

        def watched(self, pointers, *args):
            mask = args[mask_place].data.astype(bool)
            touched[self.grid_idx].extend(pointers.data[mask].tolist())
            return access(self, pointers, *args)

        monkeypatch.setattr(InterpreterBuilder, name, watched)

    def launch(self, *args, **kwargs):
        loaded.clear()
        stored.clear()
        run(self, *args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        given = [range(t.data_ptr(), t.data_ptr() + t.nbytes, t.element_size()) for t in tensors]
        assert set().union(*loaded.values(), *stored.values()) <= set().union(*given)
        writers = Counter(itertools.chain(*stored.values()))
        assert set(writers.values()) == {1}
        in_place = stored if self.fn.__name__ == "some_values_backward_kernel" else {}
        for program, addresses in loaded.items():
            assert not (writers.keys() & addresses) - set(in_place.get(program, ()))

    watch("create_masked_load", loaded, mask_place=0)
    watch("create_masked_store", stored, mask_place=1)
    monkeypatch.setattr(GridExecutor, "__call__", launch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("path", "extent", "variant"), VARIANTS)
def test_light_variants(variant, extent, layout, path):
    has_history = variant not in ("no history", "unused lambda")
    function = functools.partial(light, extent=extent, history=has_history)
    tensors = draw((2, 12, 3, 4), extent, **LIGHT[variant])
    assert_same(function, tensors, path=path, dtype=dtypes_of(path)[0], layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize(("path", "shape"), PATHS_AND_SHAPES, ids=str)
def test_light_precisions_and_shapes(shape, extent, layout, path):
    tensors, function = draw(shape, extent), functools.partial(light, extent=extent)
    for dtype in dtypes_of(path)[: 1 if path == "triton" and shape[2] > 8 else None]:
        assert_same(function, tensors, path=path, dtype=dtype, layout=layout)


@pytest.mark.parametrize("joined", [base_joined, mla_joined], ids=["base", "MLA"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extent", EXTENTS[-2:])
@pytest.mark.parametrize(("path", "shape"), PATHS_AND_SHAPES, ids=str)
def test_base_precisions_and_shapes(shape, extent, layout, path, joined):
    function = functools.partial(joined, extent=extent)
    first, *others = dtypes_of(path)[: 1 if path == "triton" and shape[2] > 8 else None]
    options = dict(path=path, layout=layout)
    for depth in (0, 2, 10):  # 11 values take the kernels two launches
        tensors = draw(shape, extent, depth=depth, history=False)
        assert_same(function, tensors, dtype=first, **options)
    for dtype in others:
        tensors = draw(shape, extent, depth=2, history=False)
        assert_same(function, tensors, dtype=dtype, **options)


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("variant", [base, mla], ids=["base", "MLA"])
def test_the_last_layer_of_a_stage(variant, extent):
    tensors = draw((2, 12, 3, 4), extent, depth=2, history=False)

    def output(t, path):
        return variant(t, extent, path)[0]

    assert_same(output, tensors, path="fused", dtype=torch.float64)


@pytest.mark.parametrize("path", PATHS)
def test_nan_is_not_hidden(path):
    """Else a loss would stay finite; a ReLU's gradient passes where its output is NaN."""
    tensors = draw((2, 12, 3, 4), "block end")
    tensors = {name: t.float().to(DEVICES[path]) for name, t in tensors.items()}
    tensors["c"][1, 5, 1, 2] = torch.nan
    tensors["c"].requires_grad_()
    out = light(tensors, "block end", path)
    assert out[1, 5, 1, 2].isnan() and not out[0].isnan().any()
    (grad,) = torch.autograd.grad(out.sum(), tensors["c"])
    assert grad[1, 5, 1, 2].isnan() and not grad[0].isnan().any()


@pytest.mark.parametrize(
    ("path", "dtype"),  # the interpreter does not round to bfloat16 as a GPU does
    [
        ("fused", torch.bfloat16),
        ("fused", torch.float16),
        pytest.param("triton", torch.float16, marks=needs_triton),
    ],
)
@pytest.mark.parametrize("depth", [0, 3])
def test_small_weights_survive_beside_the_residual_in_half_precision(dtype, path, depth):
    """A branch worth 1/100 of x; with a depth base's, whose values are not added one by one."""
    gated = bool(depth)
    tensors = draw((2, 8, 6, 5), "branch", depth=depth, gated=gated, history=False, keep=False)
    tensors |= dict.fromkeys(("bias", "mean"), torch.zeros(8).double())
    tensors |= dict(weight=torch.full((8,), 3e-3).double(), variance=torch.full((8,), 0.9).double())
    maps = ["c", *(name for name in tensors if name.startswith("values"))]
    tensors |= {name: tensors[name].to(dtype).double() for name in maps}

    def output(t, path):
        return base(t, "branch", path)[0] if depth else light(t, "branch", path, history=False)

    exact = output(tensors, "naive")
    given = {name: t.float().to(DEVICES[path]) for name, t in tensors.items()}
    given |= {name: given[name].to(dtype) for name in maps}
    y = output(given, path).double().cpu()
    rounded = exact.to(dtype).double()
    assert (y - rounded).norm() < 0.5 * (rounded - exact).norm()


@pytest.mark.parametrize("path", ["fused", TRITON])  # which compute in half precision
def test_sums_over_half_precision_maps_do_not_overflow(path):
    """Products of 300 and 300 leave float16; of both the norm's scale and lambda need the sum."""
    tensors = draw((2, 8, 6, 5), "branch", gated=False, value=False, keep=False)
    tensors |= {name: 300 * tensors[name].sign() for name in ("c", "shortcut")}
    gradients = []
    for way, dtype in (("naive", torch.float64), (path, torch.float16)):
        leaves = {}
        for name, t in tensors.items():
            is_single = dtype == torch.float16 and name not in ("c", "shortcut")
            leaf = t.to(DEVICES[path], torch.float32 if is_single else dtype)
            leaves[name] = leaf.detach().requires_grad_(name not in CONSTANT)
        out = light(leaves, "branch", way)
        out.backward(torch.full_like(out, 300))
        gradients.append([leaves[name].grad.double() for name in ("weight", "history_scale")])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1)


@pytest.mark.parametrize("path", [TRITON])
def test_values_of_a_deep_stage_that_cancel(path):
    tensors = draw((1, 8, 4, 5), "attention", depth=9, history=False)
    tensors["query"] = torch.zeros(1, 1, 5).double()  # so the values have one score
    for s in range(9):
        tensors[f"values{s}"] += 1000 if s < 8 else -8000

    def output(t, path):
        return base(t, "attention", path)[0]

    assert_same(output, tensors, path=path, dtype=torch.float16)


@pytest.mark.parametrize("variant", [base, mla], ids=["base", "MLA"])
@pytest.mark.parametrize("path", PATHS)
def test_keys_or_averages_and_gradients_of_them_that_are_not_contiguous(path, variant):
    tensors = draw((2, 12, 3, 4), "branch", depth=2, history=False)
    tensors["keys"] = tensors["keys"].mT.contiguous().mT

    def joined(t, path):
        out, (keys, *_) = variant(t, "branch", path)
        ramp = torch.linspace(-1, 1, keys.numel()).to(keys).view(keys.mT.shape)
        return out + (keys.mT * ramp).sum().to(out.dtype)

    assert_same(joined, tensors, path=path, dtype=torch.float32)


@pytest.mark.parametrize(("function", "other"), [(light, "shortcut"), (base_joined, "values0")])
@pytest.mark.parametrize("path", PATHS)
def test_other_strides_and_precision_are_taken_and_other_shapes_refused(path, function, other):
    depth = 2 * (function is base_joined)
    tensors = draw((2, 20, 4, 5), "branch", depth=depth, history=not depth)
    expected = function(tensors, "branch", "naive")
    odd = {name: t.float().to(DEVICES[path]) for name, t in tensors.items()}
    odd["c"] = odd["c"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    odd[other] = odd[other].double()
    y = function(odd, "branch", path).double().cpu()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="one shape"):
        function(odd | {other: odd[other][:, :, :1, :1]}, "branch", path)


@pytest.mark.parametrize("function", [light, base_joined])
def test_a_second_derivative_raises(function):
    """It would be zero without a word where another route leads to the input."""
    tensors = draw((1, 4, 2, 3), "branch", history=function is light)
    x = tensors["c"].requires_grad_()
    out = function(tensors, "branch", "fused") + x**3
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)


def saved_maps(function, tensors, extent):
    saved = []
    leaves = {name: t.requires_grad_(name not in CONSTANT) for name, t in tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function(leaves, extent, "fused")
    return out, {t.data_ptr() for t in saved if t.numel() >= tensors["c"].numel()}


def test_maps_that_are_saved():
    tensors = draw((2, 20, 9, 8), "branch")
    c, shortcut = tensors["c"].data_ptr(), tensors["shortcut"].data_ptr()
    assert saved_maps(light, tensors, "branch")[1] == {c, shortcut}
    del tensors["mean"]  # a batch norm in training
    assert saved_maps(light, tensors, "batch norm")[1] == {c, shortcut}
    _, saved = saved_maps(light, tensors, "block end")  # x, which c and the shortcut made
    assert len(saved) == 2 and shortcut in saved and c not in saved
    for variant, count in ((base, 3), (mla, 2)):
        tensors = draw((2, 20, 9, 8), "block end", depth=1, history=False)
        (_, (_, earlier, own)), saved = saved_maps(variant, tensors, "block end")
        assert len(saved) == count and {earlier.data_ptr(), own.data_ptr()} <= saved
        assert not {tensors["c"].data_ptr(), tensors["shortcut"].data_ptr()} & saved


@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_others_are_not_written_to(path):
    """The gradient of a sum is that of output and value alike; and backward runs twice."""
    given = draw((2, 12, 3, 4), "branch", depth=2, history=False)
    given = {name: t.float().to(DEVICES[path]) for name, t in given.items()}
    gradients = []
    for way in ("naive", path):
        leaves = {name: t.clone().requires_grad_(name not in CONSTANT) for name, t in given.items()}
        for _ in range(2):  # a stage of two layers
            out, (keys, *values) = base(leaves, "branch", way)
            leaves["keys"] = keys
            leaves |= {f"values{s}": value for s, value in enumerate(values)}
        upstream = torch.ones_like(out)
        for _ in range(2):
            (out + values[0] + values[-1]).backward(upstream, retain_graph=True)
        assert (upstream == 1).all()
        names = ("c", "query", "key", "value", "weight", "bias")
        gradients.append([leaves[name].grad for name in names])
    for ours, wanted in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("function", [light, base_joined, mla_joined])
@pytest.mark.parametrize("path", PATHS)
def test_results_are_the_same_to_the_bit_in_every_run(function, path):
    """Under autocast too, which a backward pass may be called under; no pass may see it."""
    depth = 0 if function is light else 2
    tensors = draw((3, 20, 6, 5), "block end", depth=depth, history=not depth)
    bound = functools.partial(function, extent="block end", path=path)
    first = results(bound, tensors, dtype=torch.float32, device=DEVICES[path])
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast(DEVICES[path], torch.bfloat16):
            second = results(bound, tensors, dtype=torch.float32, device=DEVICES[path])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_numba
def test_dispatch_gives_its_reasons(monkeypatch):
    x = torch.zeros(1, 4, 2, 2)
    monkeypatch.delenv("MRLA_OPS", raising=False)
    assert choose_path(x).path == "numba"
    assert choose_path(x.double()).path == choose_path(x.half()).path == "fused"
    assert choose_path(x[:0]).path == choose_path(x.long()).path == "naive"
    for path in ("naive", "fused", "numba"):
        monkeypatch.setenv("MRLA_OPS", path)
        assert choose_path(x).path == path
    with pytest.raises(InputError, match="float64"):
        choose_path(x.double())
    monkeypatch.setenv("MRLA_OPS", "fast")
    with pytest.raises(InputError, match="fast"):
        choose_path(x)
    monkeypatch.setenv("MRLA_OPS", "triton")
    with pytest.raises(InputError, match="float64"):
        choose_path(x.double())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="does not run on cpu"):
        choose_path(x)


class OnGpu(torch.Tensor):
    device = torch.device("cuda")


def test_gpu_tensors_take_triton_or_the_naive_path(monkeypatch):
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setattr(dispatch, "why_not_importable", lambda *_: "")
    gpu = torch.zeros(1, 4, 2, 2).as_subclass(OnGpu)
    assert choose_path(gpu).path == "triton"
    assert choose_path(gpu.double()).path == "naive"
    huge = torch.empty(1, 64, 5800, 5800, dtype=torch.float16, device="meta").as_subclass(OnGpu)
    assert choose_path(huge).path == "naive", "kernels count a sample in 32 bits"
    assert choose_path(huge[:, :32]).path == "triton"


def test_gpu_tensors_without_triton(monkeypatch):
    """As on Windows: plainly said, and nothing to report."""
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    for name in [name for name in sys.modules if name.startswith("mrla_mm.ops.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mrla_mm.ops.triton", raising=False)
    dispatch.why_not_importable.cache_clear()
    path, reason = choose_path(torch.zeros(1, 4, 2, 2).as_subclass(OnGpu))
    dispatch.why_not_importable.cache_clear()
    assert path == "naive" and "not installed" in reason


def test_nothing_is_checked_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(proof, "OUTCOMES", {})
    monkeypatch.setitem(proof.SELF_CHECKS, "triton", pytest.fail)
    size = torch.Size((1, 4, 2, 2))
    layer = dict(add_relu=True, has_history=True, is_mla=False, depth=0, kernel_size=3, dtypes=())
    form = Form("triton", torch.device("cuda"), torch.half, False, size, 1, **layer)
    passes = passes_of("fused")
    assert "captured" in proof.prove(form, passes).failure and not proof.OUTCOMES
    checked = proof.OUTCOMES[form.specialisation(passes)] = Outcome("", 0.0)
    assert proof.prove(form, passes) is checked


def test_fake_tensors_say_nothing_about_real_ones(monkeypatch):
    """Shapes of a GPU's tensors, where there may be none; no kernel is tried for them."""
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setitem(proof.SELF_CHECKS, "triton", pytest.fail)
    with FakeTensorMode():
        given = draw((2, 12, 3, 4), "block end").items()
        try:
            half = dict(device="cuda", dtype=torch.half)
            tensors = {name: torch.empty(t.shape, **half) for name, t in given}
            path = choose_path(tensors["c"]).path
            out = light(tensors, "block end", path)
        except RuntimeError as error:
            if "driver" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} asks a driver about fake CUDA tensors: {error}")
    assert path == "naive" and out.shape == (2, 12, 3, 4)


def test_maps_that_a_backward_pass_allocates_grow_linearly_with_depth():
    class CountMaps(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            is_new = not any(returned.alias_info for returned in func._schema.returns)
            self.count += is_new and getattr(result, "shape", ()) == (2, 12, 3, 4)
            return result

    counts = []
    for depth in (2, 4, 8):
        tensors = draw((2, 12, 3, 4), "attention", history=False)
        weights, _, memory, heads = parts(tensors)
        c = tensors["c"].requires_grad_()
        for _ in range(depth):
            y, memory = base_fused("fused", c, None, weights, memory, heads=heads)
            c = c + y
        with CountMaps() as mode:
            c.sum().backward()
        counts.append(mode.count)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0
