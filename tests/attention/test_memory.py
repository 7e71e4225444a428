"""What travels from block to block: nothing copied or overwritten, linear in depth."""

from functools import partial

import pytest
import torch
from torch import nn

from measure import saved_bytes

from .stages import VARIANTS, Stage, build_blocks, random_maps, run

SIZE = {"depth": 4, "batch": 2, "channels": 24, "head_channels": 12, "grid": (5, 4)}


def memories_of(stage):
    """The memory that each block of the stage returns."""
    memory, memories = (), []
    for block, x, shortcut in zip(stage.blocks, stage.xs, stage.shortcuts, strict=True):
        _, memory = block(x, shortcut, memory)
        memories.append(memory)
    return memories


def full_maps(memory, like):
    """Data pointers and sizes of the memory's tensors as large as a map or larger."""
    return [
        (tensor.data_ptr(), tensor.numel()) for tensor in memory if tensor.numel() >= like.numel()
    ]


@pytest.mark.parametrize("variant", ["base (a)", "base, identity value", "MLA (a)"])
def test_each_earlier_layer_is_kept_once_and_not_copied(variant):
    stage = Stage.draw(variant, **SIZE)
    kept = [full_maps(memory, stage.xs[0]) for memory in memories_of(stage)]
    for t, maps in enumerate(kept):
        pointers = [pointer for pointer, _ in maps]
        assert len(pointers) == len(set(pointers)) == t + 1
        assert all(size == stage.xs[0].numel() for _, size in maps)
        if t > 0:
            assert set(pointers) > {pointer for pointer, _ in kept[t - 1]}


@pytest.mark.parametrize(
    "variant", ["light", "light, last output", "light, no history (b)", "linear RLA"]
)
def test_recurrent_variants_carry_a_memory_of_constant_size(variant):
    stage = Stage.draw(variant, **SIZE)
    sizes = {sum(tensor.numel() for tensor in memory) for memory in memories_of(stage)}
    assert len(sizes) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_written_in_place(variant):
    stage = Stage.draw(variant, **SIZE)
    with torch.no_grad():
        memory = ()
        for block, x, shortcut in zip(stage.blocks, stage.xs, stage.shortcuts, strict=True):
            given = [x, shortcut, *memory]
            before = [tensor.clone() for tensor in given]
            out, next_memory = block(x, shortcut, memory)
            again, _ = block(x, shortcut, memory)
            assert all(map(torch.equal, [*given, out], [*before, again]))
            memory = next_memory


@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "LinearRLA"])
def test_memory_for_backward_grows_linearly_with_depth(name):
    blocks = nn.ModuleList(build_blocks(name, 6, 48, 12))
    xs = [x.requires_grad_() for x in random_maps(6, (2, 48, 16, 16))]
    saved = [saved_bytes(partial(run, blocks[:n], xs[:n], xs[:n]), blocks) for n in range(1, 7)]
    steps = torch.tensor(saved).double().diff()[1:] / xs[0].untyped_storage().nbytes()  # in maps
    assert (steps - steps[0]).abs().max() < 0.1, steps
