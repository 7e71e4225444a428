"""Values and every gradient of the modules against the step-by-step equations."""

import pytest
import torch

from .stages import VARIANTS, Stage, assert_same

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
