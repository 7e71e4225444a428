"""Values and every gradient of the modules against the step-by-step equations."""

import pytest
import torch

from .stages import VARIANTS, Stage, assert_same

STAGES = {
    "one block": {"depth": 1, "batch": 1, "channels": 24, "head_channels": 8, "grid": (3, 7)},
    "single pixel": {"depth": 2, "batch": 3, "channels": 48, "head_channels": 12, "grid": (1, 1)},
    "wide": {"depth": 3, "batch": 1, "channels": 48, "head_channels": 16, "grid": (5, 4)},
    "deep": {"depth": 4, "batch": 3, "channels": 24, "head_channels": 12, "grid": (3, 7)},
}


def assert_matches_paper(stage):
    assert_same(stage.run(), stage.run_reference(), stage.leaves())


@pytest.mark.parametrize("size", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant, size):
    assert_matches_paper(Stage.draw(variant, **STAGES[size]))


@pytest.mark.parametrize("head_channels", [1, 16, 64])
@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)", "linear RLA"])
def test_head_channels_of_table_4f(variant, head_channels):
    stage = Stage.draw(
        variant, depth=2, batch=1, channels=64, head_channels=head_channels, grid=(2, 3)
    )
    assert_matches_paper(stage)


def test_the_reference_scores_are_far_from_uniform():
    """With near-uniform attention a wrong score would hide below the tolerance."""
    stage = Stage.draw("base (a)", **STAGES["deep"])
    sharp = stage.run_reference()[-1]
    for block in stage.blocks:
        torch.nn.init.zeros_(block.query.weight)
    assert (sharp - stage.run_reference()[-1]).abs().mean() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_receives_a_gradient(variant):
    """DistributedDataParallel stops with an error at parameters that the loss does not reach."""
    stage = Stage.draw(variant, **STAGES["single pixel"])
    sum(out.sum() for out in stage.run()).backward()
    unreached = [
        name
        for name, leaf in stage.leaves().items()
        if name.startswith("block") and leaf.grad is None
    ]
    assert not unreached
