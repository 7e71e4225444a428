"""Short trainings of a tiny model, and hooks that do something in their midst."""

import os
import random
import signal

import torch
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

import mrla_mm  # noqa: F401

EPOCHS = dict(by_epoch=True, max_epochs=3)
ITERATIONS = dict(type="IterBasedTrainLoop", max_iters=10, val_interval=3)
LOOPS = {"epoch": (EPOCHS, {}), "iter": (ITERATIONS, dict(interval=2, by_epoch=False))}


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, *samples, mode):
        score = self.linear(torch.stack(samples)).mean()
        return dict(loss=score) if mode == "loss" else [score]


class ImprovingMetric(Evaluator):
    calls = 0

    def process(self, **_):
        pass

    def evaluate(self, size):
        self.calls += 1
        return dict(score=self.calls)


def build(
    work_dir, *, model=None, shape=(2,), loop=EPOCHS, workers=0, start="fork", hooks=(),
    load_from=None, resume=False, **checkpoint,
):  # fmt: skip

    def loader(sampler, shuffle):
        dataset, sampler = list(torch.rand(7, *shape)), dict(type=sampler, shuffle=shuffle)
        options = dict(num_workers=workers, persistent_workers=workers > 0)
        return dict(dataset=dataset, batch_size=2, sampler=sampler, **options)

    sampler = "InfiniteSampler" if "max_iters" in loop else "DefaultSampler"
    torch.manual_seed(0)
    runner = Runner(
        model=model or Model(),
        work_dir=str(work_dir),
        train_dataloader=loader(sampler, True),
        train_cfg=loop,
        val_dataloader=loader("DefaultSampler", False),
        val_cfg=dict(),
        val_evaluator=[],
        test_dataloader=loader("DefaultSampler", False),
        test_cfg=dict(),
        test_evaluator=[],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=dict(type="AtomicCheckpointHook", interval=1) | checkpoint),
        custom_hooks=list(hooks),
        load_from=load_from,
        resume=resume,
        randomness=dict(seed=4 if resume and loop is EPOCHS else 3),
        env_cfg=dict(mp_cfg=dict(mp_start_method=start)),
        default_scope="mmengine",
        experiment_name=f"{work_dir.name}{random.SystemRandom().random()}",
    )
    runner._val_evaluator = ImprovingMetric([])
    return runner


def weights(state_dict):
    return torch.cat([value.flatten() for value in state_dict.values()])


class At(Hook):
    def __init__(self, point, act, iteration=None, priority="LOW"):
        self.priority = priority

        def act_then(runner, *_, **__):
            if iteration in (None, runner.iter + 1):
                act()

        setattr(self, point, act_then)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
