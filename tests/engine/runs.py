"""Small trainings whose data and steps draw random numbers from every generator."""

import os
import random
import signal

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

import mrla_mm  # noqa: F401

EPOCHS = dict(by_epoch=True, max_epochs=3)
ITERATIONS = dict(type="IterBasedTrainLoop", max_iters=10, val_interval=3)
LOOPS = {"epoch": (EPOCHS, {}), "iter": (ITERATIONS, dict(interval=2, by_epoch=False))}


class NoisyData(BaseDataset):
    """Samples that depend on every generator a pipeline may draw from."""

    def load_data_list(self):
        return [dict(value=float(number)) for number in range(7)]

    def prepare_data(self, idx):
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.tensor([self.get_data_info(idx)["value"], noise])


class NoisyModel(BaseModel):
    """A model whose training draws random numbers too."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 4), nn.Dropout(0.5)

    def forward(self, *samples, mode):
        score = self.dropout(self.linear(torch.stack(samples))).mean() * np.random.rand()
        return dict(loss=score) if mode == "loss" else [score]


class NoisyMetric(Evaluator):
    """An evaluation that improves every time and draws random numbers."""

    def __init__(self):
        super().__init__([])
        self.calls = 0

    def process(self, **_):
        torch.rand(1), np.random.rand()

    def evaluate(self, size):
        self.calls += 1
        return dict(score=self.calls)


def build(work_dir, *, loop=EPOCHS, workers=0, seed=3, hooks=(), resume=False, **checkpoint):
    """Build a run of 12 iterations, four an epoch, or of ten."""
    loader = dict(
        dataset=NoisyData(), batch_size=2, num_workers=workers, persistent_workers=workers > 0
    )
    torch.manual_seed(0)
    sampler = dict(
        type="InfiniteSampler" if loop.get("max_iters") else "DefaultSampler", shuffle=True
    )
    options = dict(
        train_dataloader=dict(loader, sampler=sampler),
        train_cfg=loop,
        val_cfg=dict(),
        val_evaluator=[],
    )
    sampler = dict(type="DefaultSampler", shuffle=False)
    options |= dict(
        val_dataloader=dict(loader, dataset=NoisyData(), sampler=sampler), custom_hooks=list(hooks)
    )
    options |= dict(
        default_hooks=dict(checkpoint=dict(type="AtomicCheckpointHook", interval=1) | checkpoint)
    )
    options |= dict(
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        randomness=dict(seed=seed),
    )
    options |= dict(
        default_scope="mmengine", experiment_name=f"{work_dir.name}{random.SystemRandom().random()}"
    )
    runner = Runner(model=NoisyModel(), work_dir=str(work_dir), resume=resume, **options)
    runner._val_evaluator = NoisyMetric()
    return runner


def weights(runner):
    """Return all weights as one tensor."""
    return torch.cat([value.flatten() for value in runner.model.state_dict().values()])


class At(Hook):
    """Does something at a point of a run, at one iteration or each time."""

    def __init__(self, point, act, iteration=None, priority="LOW"):
        self.priority = priority
        setattr(
            self,
            point,
            lambda runner, *_, **__: act() if iteration in (None, runner.iter + 1) else None,
        )


def terminate():
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
