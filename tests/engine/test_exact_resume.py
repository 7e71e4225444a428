"""With ExactResumeHook an interrupted and resumed run is, bit by bit, the run that was not interrupted."""

import pytest
import torch

from .runs import LOOPS, At, build, terminate, weights

EXACT = dict(type="ExactResumeHook")


def trained(folder, *hooks, **options):
    runner = build(folder, hooks=[EXACT, *hooks], **options)
    runner.train()
    return weights(runner)


def kill():
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [terminate, kill])
@pytest.mark.parametrize(("loop", "every"), LOOPS.values(), ids=LOOPS)
def test_resumed_run_ends_with_the_same_weights(tmp_path, loop, every, end):
    whole = trained(tmp_path / "whole", loop=loop, **every)
    other = trained(tmp_path / "other", loop=loop, seed=4, **every)
    assert not torch.equal(whole, other), "the seed decides, so equality below means something"
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trained(tmp_path / "cut", At("after_train_iter", end, 6), loop=loop, **every)
    assert torch.equal(trained(tmp_path / "cut", loop=loop, resume=True, **every), whole)


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(tmp_path):
    whole = trained(tmp_path / "0")
    with pytest.raises(SystemExit):
        trained(tmp_path / "2", At("after_train_iter", terminate, 6), workers=2)
    assert torch.equal(trained(tmp_path / "2", workers=2, resume=True), whole)


def test_a_run_without_a_configured_seed_resumes_in_its_data_order(tmp_path):
    with pytest.raises(SystemExit):
        trained(tmp_path, At("after_train_iter", terminate, 6), seed=None)
    first = torch.load(tmp_path / "interrupted.pth")["meta"]
    resumed = build(tmp_path, seed=None, resume=True, hooks=[EXACT])
    resumed.train()
    assert resumed.train_dataloader.sampler.seed == first["replay"]["sampler_seed"]
    assert resumed.seed == first["seed"] and resumed.iter == 12
