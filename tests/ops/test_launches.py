"""Launches of the Triton kernels as a model makes them: recorded on the meta device, compiled without a GPU.

A GPU's launch makes a constant of each whole number that is 1, which may be another program; the interpreter does not.
"""

import inspect

import pytest
import torch

from mrla_mm.errors import InputError
from mrla_mm.ops import Affine, LightWeights, base_block_end, dispatch, light_block_end

from .test_fused import INTERPRETED

pytest.importorskip("triton")
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ALIGNED = [["tt.divisibility", 16]]


@pytest.fixture
def launches(monkeypatch):
    """Record what is launched, (kernel, grid, arguments by name), in place of launching it, whatever the device."""
    from mrla_mm.ops import triton

    found = []

    def record(kernel, *arguments, grid, warmup, **more):
        found.append((kernel, grid, dict(zip(kernel.arg_names, arguments, strict=False), **more)))

    monkeypatch.setenv("MRLA_OPS", "triton")
    monkeypatch.setattr(dispatch, "why_not_triton", lambda x: "")
    monkeypatch.setattr(triton, "launcher", lambda kernel: kernel)  # without a GPU's kernel, torch would only trace it
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
        arguments = dict(heads=4, affine=Affine(leaf(channels), leaf(channels)))
        if variant == "light":
            shortcut = light_block_end(c, shortcut, LightWeights(query, key, value, scale), **arguments)
        else:
            shortcut, *own = base_block_end(c, shortcut, (query, key, value), (keys, values), **arguments)
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


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("variant", ["light", "base"])
def test_what_is_launched_for_one_pixel_compiles(variant, launches):
    """Every size that can be 1 is 1: samples, rows, columns, tiles, values."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    train_step(variant, (1, 4, 1, 1), torch.float16)
    sources = {}
    for kernel, _, arguments in launches:
        types, constants, attributes = specialised(kernel, arguments)
        key = (kernel.__name__, *types.items(), *constants.items(), *attributes)
        sources[key] = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    assert len({name for name, *_ in sources}) == 6
    for source in sources.values():
        assert ".visible .entry" in compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("variant", ["light", "base"])
def test_a_map_beyond_32_bits_is_refused(variant, launches):
    with pytest.raises(InputError, match=r"\(1, 64, 5800, 5800\) have 2\^31 or more elements a sample: use MRLA_OPS"):
        train_step(variant, (1, 64, 5800, 5800), torch.float16)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("variant", ["light", "base"])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 256, 200, 334), (1, 256, 2000, 2000), (70000, 64, 7, 7)], ids=str)
def test_grids_are_those_of_a_gpu(shape, variant, layout, launches):
    """A GPU takes 65,535 programs along all sides of a grid but the first, and none of a side of no programs."""
    train_step(variant, shape, torch.float16, layout)
    assert launches
    for kernel, grid, _ in launches:
        assert 0 < grid[0] < 2**31 and all(0 < side < 2**16 for side in grid[1:]), (kernel.__name__, grid)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("variant", ["light", "base"])
def test_a_compiler_sees_what_is_written(variant, launches, monkeypatch):
    """torch.compile copies every tensor that a kernel may write to: unused arguments must not be among them."""
    from torch._higher_order_ops import triton_kernel_wrap
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Sm90:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(driver, "_active", Sm90())
    train_step(variant, (2, 64, 8, 16), torch.float16)
    found = {}
    for kernel, _, arguments in launches:
        extra = [{}] if len(inspect.signature(triton_kernel_wrap.identify_mutated_tensors).parameters) > 2 else []
        given = {name: arguments[name] for name in kernel.arg_names}
        found.setdefault(kernel.__name__, []).append(
            set(triton_kernel_wrap.identify_mutated_tensors(kernel, given, *extra))
        )
    if variant == "base":
        wanted = [{"sums_ptr", *(f"g{index}" for index in range(count))} for count in (3, 2, 1)]
        assert found["sum_backward_kernel"] == wanted
    else:
        assert found["sums_kernel"] == 3 * [{"by_taps_ptr", "by_slope_ptr", "by_shift_ptr"}]
    assert all(names <= {"out_ptr", "by_previous_ptr"} for names in found["apply_kernel"])
