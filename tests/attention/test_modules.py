"""Values and every gradient against the paper's equations, what is kept, and arguments."""

from functools import partial

import pytest
import torch

from measure import saved_bytes
from mrla_mm import attention
from mrla_mm.errors import InputError

from .stages import VARIANTS, Stage, assert_same, build_blocks, random_maps, run

STAGES = {
    "one block": dict(depth=1, batch=1, channels=24, head_channels=8, grid=(3, 7)),
    "single pixel": dict(depth=2, batch=3, channels=48, head_channels=12, grid=(1, 1)),
    "wide": dict(depth=3, batch=1, channels=48, head_channels=48, grid=(5, 4)),
    "deep": dict(depth=4, batch=3, channels=24, head_channels=12, grid=(3, 7)),
}


@pytest.mark.parametrize("size", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant, size):
    """DistributedDataParallel stops with an error at parameters without a gradient."""
    stage = Stage(variant, **STAGES[size])
    assert_same(stage.run(), stage.run_reference(), stage.leaves)
    sum(out.sum() for out in stage.run()).backward()
    assert all(p.grad is not None for p in stage.blocks.parameters())


@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)", "linear RLA"])
def test_heads_of_one_channel(variant):
    stage = Stage(variant, **dict(STAGES["wide"], head_channels=1))
    assert_same(stage.run(), stage.run_reference(), stage.leaves)


def test_a_hook_on_the_value_of_mla_sees_every_map():
    stage = Stage("MLA (a)", **STAGES["deep"])
    stage.options["gelu"] = torch.tanh
    for block in stage.blocks:
        block.value.register_forward_hook(lambda module, given, out: out.tanh())
    assert_same(stage.run(), stage.run_reference(), stage.leaves)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_nothing_is_written_in_place(variant):
    stage, memory = Stage(variant, **STAGES["deep"]), ()
    for block, x, shortcut in zip(stage.blocks, stage.xs, stage.shortcuts, strict=True):
        given = [x, shortcut, *memory]
        before = [tensor.clone() for tensor in given]
        out, next_memory = block(x, shortcut, memory)
        again, _ = block(x, shortcut, memory)
        assert all(map(torch.equal, [*given, out], [*before, again]))
        memory = next_memory


@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
def test_memory_for_backward_grows_linearly_with_depth(name):
    blocks, xs = build_blocks(name, 6, 48, 12), random_maps(6, (2, 48, 16, 16))
    saved = [saved_bytes(partial(run, blocks[:n], xs[:n], xs[:n]), blocks) for n in range(1, 7)]
    steps = torch.tensor(saved).double().diff()[1:] / xs[0].untyped_storage().nbytes()  # in maps
    assert (steps - steps[0]).abs().max() < 0.1, steps


SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 1280: 5, 2048: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3
PROJECTIONS = [(channels, {}, (1, 1, size)) for channels, size in SIZES.items()]
PROJECTIONS += [(24, dict(kernel_size=9), (1, 1, 9)), (24, dict(projection="linear"), (24, 24))]
PROJECTIONS += [(24, dict(projection="linear", reduction=2), (12, 24))]


@pytest.mark.parametrize("kind", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
@pytest.mark.parametrize(("channels", "options", "shape"), PROJECTIONS, ids=str)
def test_shapes_of_query_and_key(channels, options, shape, kind):
    module = getattr(attention, kind)(channels, head_channels=4, **options)
    assert module.query.weight.shape == module.key.weight.shape == shape


BAD = [
    (dict(head_channels=10), "head_channels=10"),
    (dict(head_channels=0), "head_channels=0"),
    (dict(head_channels="a"), "head_channels='a'"),
    (dict(head_channels=2.0), "head_channels=2.0"),
    (dict(value="conv"), "value='conv'"),
    (dict(projection="mlp"), "projection='mlp'"),
    (dict(kernel_size=4), "kernel_size=4"),
    (dict(reduction=2), "reduction=2"),  # the 1D convolution keeps every channel
    (dict(projection="linear", kernel_size=3), "kernel_size=3"),  # a matrix has no kernel
    (dict(projection="linear", reduction=3), "reduction=3"),  # 24 / 3 is whole, 8 / 3 is not
    (dict(previous="earlier"), "earlier"),
    (dict(previous="none", learnable_lambda=False), "learnable_lambda=False"),
    (dict(gated=False, kernel_size=5), "kernel_size"),
    (dict(gated=False, projection="linear", reduction=2), "gated=False"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=str)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        attention.MRLALight(24, **(dict(head_channels=8) | arguments))
