"""The Triton kernels, against plain PyTorch and compiled as a GPU launches them."""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import host_cost
from mrla_mm.errors import InputError
from mrla_mm.ops import (
    BatchNorm,
    Weights,
    base_fused,
    dispatch,
    light_fused,
    mla_fused,
    proof,
    self_check,
)

from . import cases
from .cases import DEVICE, INTERPRETED, base_joined, draw, light, mla_joined, needs_triton, results
from .test_fused import apart, assert_same, poisoned

__all__ = ["apart", "poisoned"]  # fixtures of this module too
triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.backends", reason="the kernels are for Triton 3")
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ALIGNED = [["tt.divisibility", 16]]


@pytest.mark.slow
@pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="this process runs the Triton tests itself"
)
def test_triton_interpreted():
    """Run this folder's Triton tests through Triton's interpreter, chosen before its import."""
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "get_int1_ty"):
        pytest.skip("the interpreter of Triton before 3.3 has no booleans")
    options = ["-q", "-x", "-k", "triton and not interpreted"]
    command = [sys.executable, "-m", "pytest", *options, os.path.dirname(__file__)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


@needs_triton
def test_triton_programs_that_sum_several_tiles(monkeypatch):
    from mrla_mm.ops.triton import launch

    monkeypatch.setattr(launch, "count_programs", lambda device: 2)
    for function, channels, depth in ((light, 4, 0), (base_joined, 8, 1), (mla_joined, 8, 1)):
        tensors = draw((1, channels, 33, 35), "block end", depth=depth, history=not depth)
        bound = functools.partial(function, extent="block end")
        assert_same(bound, tensors, path="triton", dtype=torch.float32)


@needs_triton
def test_triton_adds_up_the_sums_of_many_spans(monkeypatch):
    """More than the kernels load at a time for heads as wide as these."""
    monkeypatch.setattr(cases, "HEAD_CHANNELS", 260)
    tensors, function = draw((2, 520, 17, 4), "branch"), functools.partial(light, extent="branch")
    tensors["query"] *= 0.1  # else the gate is at its limit
    assert_same(function, tensors, path="triton", dtype=torch.float32, layout="channels_last")


@needs_triton
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1, 4, 9, 70), (2, 4, 17, 132), (1, 8, 1, 66), (1, 4, 20, 64)])
def test_triton_rows_of_several_tiles(shape, layout):
    tensors = draw(shape, "branch", gated=False)
    function = functools.partial(light, extent="branch")
    assert_same(function, tensors, path="triton", dtype=torch.float32, layout=layout)


@needs_triton
@pytest.mark.parametrize(
    ("shape", "width", "kernel", "absent"),
    [
        ((19, 40, 1, 2), 20, 3, ()),
        ((1, 33, 2, 1), 11, 9, ("keep",)),
        ((2, 12, 1, 3), 1, 1, ("history_scale", "weight")),
        ((17, 6, 1, 2), 6, 5, ("mean", "keep")),
        ((2, 34, 2, 2), 17, 5, ("bias",)),
    ],
)
@pytest.mark.parametrize("depth", [0, 4])
def test_triton_gates(depth, shape, width, kernel, absent, monkeypatch):
    monkeypatch.setattr(cases, "HEAD_CHANNELS", width)
    tensors = draw(shape, "branch", depth=max(depth - 1, 0), history=not depth)
    tensors |= {name: torch.randn(1, 1, kernel).double() for name in ("query", "key")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in absent}
    function = functools.partial(base_joined if depth else light, extent="branch")
    assert_same(function, tensors, path="triton", dtype=torch.float32)


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setattr(proof, "OUTCOMES", {})
    monkeypatch.setitem(proof.SELF_CHECKS, "triton", self_check.self_check)


FAULTS = {
    "wrong sign": ("convolve_backward", lambda maps: maps["grad_history"].neg_()),
    "missed boundary row": ("convolve", lambda maps: maps["out"][:, :, -1].zero_()),
    "uninitialised output": ("convolve", lambda maps: maps["out"].fill_(torch.nan)),
    "no compiler": ("add_relu", lambda maps: maps["Failed to find C compiler"]),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_triton_kernel_is_not_used(fault, unchecked, monkeypatch):
    from mrla_mm.ops.triton import TritonPasses

    name, damage = FAULTS[fault]
    original = getattr(TritonPasses, name)

    def damaged(*args, **maps):
        result = original(*args, **maps)
        damage({name: tensor for name, tensor in maps.items() if tensor is not None})
        return result

    monkeypatch.setattr(TritonPasses, name, damaged)
    tensors = draw((2, 12, 3, 4), "block end")
    function = functools.partial(light, extent="block end")
    with pytest.warns(UserWarning, match="unfused from now on: the self-check .* failed") as caught:
        assert_same(function, tensors, path="triton", dtype=torch.float32)
        assert_same(function, tensors, path="triton", dtype=torch.float32)
    assert len(caught) == 1
    monkeypatch.setenv("MRLA_OPS", "triton")
    with pytest.raises(InputError, match="self-check"):
        assert_same(function, tensors, path="triton", dtype=torch.float32)


class FailingLaunch(dict):
    """Known kernels: none, but for one of the calls a kernel that cannot be launched."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.count = 0

    def get(self, key):
        self.count += 1
        return self if self.count - 1 == self.index else None

    def __getitem__(self, grid):
        raise RuntimeError("out of resource: shared memory")


@needs_triton
@pytest.mark.parametrize(
    ("function", "depth", "launches"), [(light, 0, 6), (base_joined, 8, 10), (mla_joined, 1, 10)]
)
def test_a_step_survives_the_failure_of_any_triton_launch(
    function, depth, launches, unchecked, monkeypatch
):
    from mrla_mm.ops.triton import launch

    monkeypatch.setitem(proof.SELF_CHECKS, "triton", lambda form, passes: ("", 0.0))
    bound = functools.partial(function, extent="block end")
    tensors = draw((2, 8, 1, 2), "block end", depth=depth, history=not depth, keep=False)
    for index in range(launches):
        monkeypatch.setattr(proof, "OUTCOMES", {})
        monkeypatch.setattr(launch, "KNOWN", FailingLaunch(index))
        with pytest.warns(UserWarning, match="unfused from now on: .*out of resource") as caught:
            assert_same(bound, tensors, path="triton", dtype=torch.float32)
        assert len(caught) == 1
        launched = launch.KNOWN.count
        assert index < launched <= launches
        assert_same(bound, tensors, path="triton", dtype=torch.float32)
        assert launch.KNOWN.count == launched


@needs_triton
def test_a_triton_step_lets_a_lack_of_memory_for_tensors_through(unchecked, monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError

    tensors = draw((1, 4, 2, 3), "block end")
    monkeypatch.setattr(self_check, "largest_difference", no_memory)
    function = functools.partial(light, extent="block end", path="triton")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        results(function, tensors, dtype=torch.float32, device=DEVICE)
    assert not proof.OUTCOMES
    monkeypatch.setattr(self_check, "largest_difference", lambda *args: (0.0, "output"))
    monkeypatch.setattr(torch, "empty_like", no_memory)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        results(function, tensors, dtype=torch.float32, device=DEVICE)


class NoOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"the caller's mode sees {func}")


@needs_triton
def test_triton_is_checked_once_and_leaves_the_caller_alone(unchecked, monkeypatch):
    x = torch.zeros(1, 4, 2, 2, device=DEVICE)
    state = torch.get_rng_state()
    hooks = torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail)
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16), hooks, NoOperator():
        assert "1 specialisations" in self_check.probe("triton", x, variants=("light",))
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    (outcome,) = proof.OUTCOMES.values()
    assert not outcome.failure and 0 < outcome.difference < 1e-5
    monkeypatch.setattr(self_check, "largest_difference", lambda *key: pytest.fail("again"))
    self_check.probe("triton", x, variants=("light",))


@pytest.fixture
def launches(monkeypatch):
    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    found = []

    def record(kernel, *arguments, grid, warmup):
        found.append((kernel, grid, dict(zip(kernel.arg_names, arguments, strict=True))))

    monkeypatch.setattr("triton.runtime.JITFunction.run", record)
    return found


def train_step(variant, shape, dtype, layout=torch.contiguous_format):
    def leaf(*shape, dtype=torch.float32):
        return torch.empty(shape, device="meta", dtype=dtype).requires_grad_()

    c, shortcut = (leaf(*shape, dtype=dtype).to(memory_format=layout) for _ in range(2))
    channels, memory = shape[1], ()
    for _ in range(3):
        query, key = leaf(1, 1, 3), leaf(1, 1, 3)
        value, scale = leaf(channels, 1, 3, 3), leaf(channels)
        norm = BatchNorm(leaf(channels), leaf(channels), *leaf(2, channels).detach())
        options = dict(heads=4, add_relu=True, norm=norm)
        if variant == "light":
            weights = Weights(query, key, value, scale)
            shortcut = light_fused("triton", c, shortcut, weights, has_history=True, **options)
        else:
            function = mla_fused if variant == "MLA" else base_fused
            weights = Weights(query, key, value)
            shortcut, memory = function("triton", c, shortcut, weights, memory, **options)
            if variant == "MLA":  # averages (B, C), of which each layer makes keys
                averages, *maps = memory
                memory = (averages[:, None].expand(-1, len(maps), -1), *maps)
    assert shortcut.is_contiguous(memory_format=layout)
    shortcut.float().square().mean().backward()


def specialised(kernel, arguments):
    types, constants, attributes = {}, {}, {}
    assert arguments.keys() == set(kernel.arg_names)
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name], attributes[place,] = TYPES[value.dtype], ALIGNED
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = value % 16 == 0 and not parameter.do_not_specialize
            attributes |= {(place,): ALIGNED} if is_aligned else {}
    return types, constants, attributes


@pytest.mark.parametrize(
    ("shape", "target"),
    [((1, 4, 1, 1), 90), *[((2, 64, 12, 14), target) for target in (90, 80, 75)]],
    ids=str,
)
@pytest.mark.parametrize("variant", ["light", "base", "MLA"])
def test_what_is_launched_compiles(variant, shape, target, launches):
    """Every size that can be 1 is 1 in the first shape; the second loads elements in groups."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    if "constexprs" not in ASTSource.__init__.__code__.co_varnames:
        pytest.skip("Triton before 3.3 is asked to compile in another way")
    train_step(variant, shape, torch.float16)
    sources = {}
    for kernel, _, arguments in launches:
        types, constants, attributes = specialised(kernel, arguments)
        key = (kernel.__name__, *types.items(), *constants.items(), *attributes)
        sources[key] = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    assert len({name for name, *_ in sources}) == (5 if variant == "light" else 7)
    for (name, *_), source in sources.items():
        ptx = compile(source, target=GPUTarget("cuda", target, 32)).asm["ptx"]
        assert ".visible .entry" in ptx
        if shape[3] == 14 and name.startswith(("add_relu", "weighted_sum")):
            # 168 positions, eight at a time in half precision
            assert re.search(r"ld\.global[.\w]*\.v4\.b32", ptx)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("variant", ["light", "base", "MLA"])
@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 1), (2, 256, 200, 334), (1, 256, 2000, 2000), (70000, 64, 7, 7)], ids=str
)
def test_grids_are_those_of_a_gpu(shape, variant, layout, launches):
    """A GPU takes 1 to 65,535 programs along all sides of a grid but the first."""
    train_step(variant, shape, torch.float16, layout)
    assert launches
    for kernel, grid, _ in launches:
        fits = 0 < grid[0] < 2**31 and all(0 < side < 2**16 for side in grid[1:])
        assert fits, (kernel.__name__, grid)


def test_a_second_launch_passes_what_triton_passes(monkeypatch):
    from triton.runtime import driver

    from mrla_mm.ops.triton import launch, reduce

    if INTERPRETED or not launch.CAN_CACHE or not hasattr(driver, "_active"):
        pytest.skip("this Triton's launches are not cached")
    monkeypatch.setattr(driver, "_active", driver._active)
    launched = host_cost.stub_driver()
    monkeypatch.setattr(launch, "KNOWN", {})
    kernel = reduce.add_relu_kernel
    caches = type(kernel.device_caches)(kernel.create_binder)  # else later tests get the stub's
    monkeypatch.setattr(kernel, "device_caches", caches)
    x, averages = torch.zeros(2, 4, 6, 5), torch.zeros(1, 2, 4)
    inputs, outputs = dict(x_ptr=x, shortcut_ptr=None), dict(out_ptr=None, averages_ptr=averages)
    tiling = dict(B=2, units=30, UNIT=1, CHANNELS_LAST=False, BLOCK_C=4, BLOCK_S=32)
    for span in (32, 32, 16):
        launch.launch(kernel, (2, 1, 1), inputs, outputs, dict(tiling, C=4, span=span))
    through_triton, cached = ([*args[:6], *args[7:]] for args in launched[:2])  # without metadata
    assert through_triton[:3] == [2, 1, 1]
    for first, second in zip(through_triton, cached, strict=True):
        assert first is second or first == second
    assert (len(launched), len(launch.KNOWN)) == (3, 2)


LAYERS = [("light", 0), ("base", 1), ("base", 3), ("MLA", 2)]
SHAPES = [(2, 256, 25, 42), (2, 512, 13, 84), (32, 96, 7, 7), (1, 320, 56, 150)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("variant", "depth"), LAYERS)
def test_a_small_layer_compiles_to_the_same_kernels(variant, depth, last, launches):
    """What the self-check runs; beside it, one layer of the middle and one at a stage's end."""
    dtypes = (torch.float32,) * 9 if variant == "light" else (torch.float32,) * 3 + (None,) * 6
    flags = dict(add_relu=True, has_history=variant == "light", is_mla=variant == "MLA")
    passes = dispatch.passes_of("triton")
    for shape in SHAPES:
        form = proof.Form(
            "triton", torch.device("meta"), torch.float16, last, torch.Size(shape), shape[1] // 32,
            depth=depth, kernel_size=5, dtypes=dtypes, **flags,
        )  # fmt: skip
        small = self_check.shrink(form, passes)
        assert small.shape.numel() < 2**19 and small.shape != form.shape
        compiled = []
        for some in (form, small):
            launches.clear()
            for is_last in (False, True):
                inputs = self_check.random_inputs(some, 0)
                self_check.forward_backward(some, inputs, is_naive=False, is_last=is_last)
            compiled.append(
                {(kernel.__name__, str(specialised(kernel, args))) for kernel, _, args in launches}
            )
        assert compiled[0] == compiled[1]
