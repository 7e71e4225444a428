"""What travels from block to block: nothing copied or overwritten, linear in depth."""

from functools import partial

import pytest
import torch

from measure import saved_bytes

from .stages import VARIANTS, Stage, build_blocks, random_maps, run

SIZE = dict(depth=4, batch=2, channels=24, head_channels=12, grid=(5, 4))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_nothing_is_written_in_place(variant):
    stage, memory = Stage(variant, **SIZE), ()
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
