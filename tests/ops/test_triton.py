"""The Triton kernels: against plain PyTorch at sizes that take several programs, and compiled as a GPU launches them.

A GPU's launch makes a constant of each whole number that is 1, which may be another program; the interpreter does not.
"""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch

from mrla_mm.ops import Affine, LightWeights, base_fused, choose_path, dispatch, light_fused
from mrla_mm.ops import coefficients as plain
from mrla_mm.ops.coefficients import Gate, GridSums

from .cases import DEVICE, INTERPRETED, base_joined, draw, light, needs_triton
from .test_fused import assert_same, poisoned

__all__ = ["poisoned"]  # a fixture of this module too
triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.backends", reason="the kernels are for Triton 3")
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ALIGNED = [["tt.divisibility", 16]]


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this process runs the Triton tests itself")
def test_triton_interpreted():
    """Run this folder's Triton tests through Triton's interpreter, which must be chosen before Triton is imported."""
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
    from mrla_mm.ops.triton import reduce, stencil

    for module in (reduce, stencil):
        monkeypatch.setattr(module, "PROGRAMS", 2)
    options = dict(path="triton", dtype=torch.float32)
    assert_same(functools.partial(light, extent="block end"), draw((1, 4, 33, 35), "block end"), **options)
    tensors = draw((1, 4, 33, 35), "block end", depth=1, history=False)
    assert_same(functools.partial(base_joined, extent="block end"), tensors, **options)


@needs_triton
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1, 4, 9, 70), (2, 4, 17, 132), (1, 8, 1, 66), (1, 4, 20, 64)])
def test_triton_rows_of_several_tiles(shape, layout):
    tensors = draw(shape, "branch", gated=False)
    function = functools.partial(light, extent="branch")
    assert_same(function, tensors, path="triton", dtype=torch.float32, layout=layout)


@needs_triton
@pytest.mark.parametrize(
    ("batch", "channels", "heads", "kernel", "absent"),
    [
        (19, 40, 2, 3, ()),
        (1, 33, 3, 9, ("keep",)),
        (2, 12, 12, 1, ("history_scale",)),
        (17, 6, 1, 5, ("affine", "keep")),
        (2, 34, 2, 5, ("value",)),
    ],
)
def test_triton_coefficients(batch, channels, heads, kernel, absent):
    from mrla_mm.ops.triton import gate as kernels

    torch.manual_seed(0)
    there = {name: name not in absent for name in ("keep", "history_scale", "affine", "value")}

    def random(wanted, *shape):
        return torch.randn(shape, device=DEVICE) if wanted else None

    size = 9 if there["value"] else 1
    value = random(there["value"], channels, 1, 3, 3)
    weights = LightWeights(random(True, 1, 1, kernel), random(True, 1, 1, kernel), value,
                           random(there["history_scale"], channels))  # fmt: skip
    affine = Affine(random(True, channels), random(True, channels), random(there["keep"], batch))
    affine = affine if there["affine"] else None
    history, shift = there["history_scale"], there["affine"]
    sums = GridSums(
        random(True, batch, channels, size), random(history, batch, channels), random(shift, batch, channels)
    )
    x, pooled, found = torch.ones(batch, channels, 3, 5, device=DEVICE), random(True, batch, channels), []
    for way in (kernels, plain):
        gate, coefficients = way.light_coefficients(x, Gate(pooled), weights, affine, heads=heads, has_history=history)
        constant, gradients = way.light_coefficients_backward(x, gate, weights, affine, sums)
        expanded = [None if t is None else t.expand(batch, channels) for t in coefficients[1:]]
        found.append([*gate, coefficients.taps, *expanded, constant, *gradients])
    for ours, wanted in zip(*found, strict=True):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@needs_triton
def test_triton_is_tried_before_it_is_trusted(monkeypatch):
    from mrla_mm.ops import triton as passes

    here = torch.device(DEVICE)
    assert dispatch.why_triton_fails.__wrapped__(here) == ""

    def no_compiler(x):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(passes, "pool", no_compiler)
    with pytest.warns(UserWarning, match="C compiler"):
        assert "C compiler" in dispatch.why_triton_fails.__wrapped__(here)


@pytest.fixture
def launches(monkeypatch):
    """Record what is launched, (kernel, grid, arguments by name), in place of launching it, whatever the device."""
    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    found = []

    def record(kernel, *arguments, grid, warmup, **more):
        found.append((kernel, grid, dict(zip(kernel.arg_names, arguments, strict=False), **more)))

    monkeypatch.setattr("triton.runtime.JITFunction.run", record)
    return found


def train_step(variant, shape, dtype, layout=torch.contiguous_format):
    """Forward and backward of the ends of three blocks with frozen statistics: maps of a shape, four heads."""

    def leaf(*shape, dtype=torch.float32):
        return torch.empty(shape, device="meta", dtype=dtype).requires_grad_()

    c, shortcut = (leaf(*shape, dtype=dtype).to(memory_format=layout) for _ in range(2))
    channels, keys, values = shape[1], [], []
    for _ in range(3):
        query, key, value, scale = leaf(1, 1, 3), leaf(1, 1, 3), leaf(channels, 1, 3, 3), leaf(channels)
        options = dict(heads=4, add_relu=True, affine=Affine(leaf(channels), leaf(channels)))
        if variant == "light":
            weights = LightWeights(query, key, value, scale)
            shortcut = light_fused("triton", c, shortcut, weights, has_history=True, **options)
        else:
            shortcut, *own = base_fused("triton", c, shortcut, (query, key, value), (keys, values), **options)
            keys, values = [*keys, own[0]], [*values, own[1]]
    assert shortcut.is_contiguous(memory_format=layout)
    shortcut.float().square().mean().backward()


def specialised(kernel, arguments):
    """Types, constants and alignments that a launch compiles a kernel for."""
    types, constants, attributes = {}, {}, {}
    assert arguments.keys() == set(kernel.arg_names)
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name], attributes[place,] = TYPES[value.dtype], ALIGNED
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
            attributes |= {(place,): ALIGNED} if value % 16 == 0 else {}
    return types, constants, attributes


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 64, 12, 20)], ids=str)
@pytest.mark.parametrize("variant", ["light", "base"])
def test_what_is_launched_compiles_for_sm_90(variant, shape, launches):
    """Every size that can be 1 is 1 in the first shape; the second loads several elements at a time."""
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
    assert len({name for name, *_ in sources}) == 6
    for (name, *_), source in sources.items():
        ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert ".visible .entry" in ptx
        if name == "apply_kernel" and shape[3] == 20:  # four columns in half precision, eight bytes, at a time
            assert re.search(r"ld\.global[.\w]*\.v2\.b32", ptx)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("variant", ["light", "base"])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 256, 200, 334), (1, 256, 2000, 2000), (70000, 64, 7, 7)], ids=str)
def test_grids_are_those_of_a_gpu(shape, variant, layout, launches):
    """A GPU takes 65,535 programs along all sides of a grid but the first, and none of a side of no programs."""
    train_step(variant, shape, torch.float16, layout)
    assert launches
    for kernel, grid, _ in launches:
        assert 0 < grid[0] < 2**31 and all(0 < side < 2**16 for side in grid[1:]), (kernel.__name__, grid)


def test_maps_beyond_32_bits_take_the_fused_path(monkeypatch):
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setattr(dispatch, "why_triton_fails", lambda device: "")

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    x = torch.empty(1, 64, 5800, 5800, dtype=torch.float16, device="meta").as_subclass(OnGpu)
    assert choose_path(x).path == "fused"
    assert choose_path(x[:, :32]).path == "triton"
