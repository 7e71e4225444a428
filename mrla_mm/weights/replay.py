"""Random numbers and data order that a resumed run repeats exactly.

mmengine 0.10 restores epoch, iteration and seed only. After a resume four things differ from the run that was not
interrupted: the random state of the process (what the RoI samplers, drop path and mixup draw), that of the data loading
workers (which start anew from the same seed), the samplers' seed if the config names none (they are built before the
checkpoint is read), and within an epoch the place in it.

Here nothing random depends on what ran before. Every step starts from random states that are a function of (seed,
iteration), every batch is loaded from states that are a function of (seed, rank, epoch, number of the batch). So any
iteration can be entered from outside, evaluation in between changes nothing, and neither does the number of workers.
"""

import atexit
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.runner import Runner
from torch.utils.data import DataLoader

DATA, STEP = 0, 1  # the two streams of random numbers


def seed_everything(*key: int) -> None:
    """Set the random states of Python, NumPy and torch (of all devices) to a function of the key."""
    words = np.random.SeedSequence(key).generate_state(8)
    random.seed(int(words[0]))
    np.random.seed(words[1:6])
    torch.manual_seed(int(words[6]) << 32 | int(words[7]))


class SeededBatch(list):
    """The indices of a batch and the key of the random numbers it is loaded with."""

    key: tuple[int, ...]


class SeededFetch:
    """Loads the batches of a data set, each from its own random state; torch calls it in place of `dataset[index]`."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.original = getattr(dataset, "__getitems__", None)

    def __call__(self, indices: Sequence[int]) -> list:
        """Return the samples of a batch."""
        if isinstance(indices, SeededBatch):
            seed_everything(*indices.key)
        return self.original(indices) if self.original else [self.dataset[index] for index in indices]


def replayed(kind: type) -> type:
    """Return a class of batch samplers that gives batches their keys, and leaves out those already trained on."""

    class Replayed(kind):
        replay: "Replay"

        def __iter__(self) -> Iterator[SeededBatch]:
            replay = self.replay
            skip, replay.skip = replay.skip, 0
            start = replay.seed, DATA, get_rank(), replay.round
            replay.round += 1
            for number, indices in enumerate(super().__iter__()):
                if number >= skip:
                    batch = SeededBatch(indices)
                    batch.key = (*start, number)
                    yield batch

    return Replayed


class ShieldedWorker:
    """Starts a data loading worker that lives through a SIGTERM to the whole job, but not through its parent's end.

    Left alone, a worker whose parent is killed waits forever, with its memory, to hand over a batch larger than a pipe.
    """

    def __init__(self, start: Callable[[int], None] | None):
        self.start = start
        self.parent = os.getpid()
        self.ended = multiprocessing.RawValue("b", 0)
        atexit.register(self.release)  # runs before multiprocessing ends its children by SIGTERM and waits for them

    def release(self) -> None:
        """Let the workers end by SIGTERM."""
        self.ended.value = 1

    def terminate(self, *_) -> None:
        """End a worker if its parent ends."""
        if self.ended.value:
            os._exit(0)

    def follow(self) -> None:
        """End the worker when another process becomes its parent: its own has ended."""
        while os.getppid() == self.parent:
            time.sleep(1)
        os._exit(1)

    def __call__(self, worker: int) -> None:
        """Start the worker of this number."""
        signal.signal(signal.SIGTERM, self.terminate)
        threading.Thread(target=self.follow, daemon=True).start()
        if self.start is not None:
            self.start(worker)


def shield_workers(loader: object) -> None:
    """Let the workers that a loader will start live through a SIGTERM to the whole job."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, ShieldedWorker):
        loader.worker_init_fn = ShieldedWorker(loader.worker_init_fn)


class Replay:
    """The place of a run in its data and random numbers: kept, stored in checkpoints, and taken up again."""

    def __init__(self):
        self.seed = 0
        self.round = 0  # epochs, or starts of the loader where there are none
        self.skip = 0
        self.done = 0  # batches of the epoch
        self.resumed: dict = {}

    def record(self, runner: Runner, iteration: int) -> dict:
        """Return what a checkpoint must hold beside mmengine's own content: plain numbers."""
        loader = runner.train_loop.dataloader
        record = dict(iter=iteration, batches=self.done, epoch_batches=len(loader))
        seed = getattr(sampler_of(loader), "seed", None)
        return record if seed is None else record | dict(sampler_seed=int(seed))

    def start(self, runner: Runner) -> None:
        """Take the training data loader over, at the place where the run stands."""
        loop = runner.train_loop
        loader, iterator = loop.dataloader, getattr(loop, "dataloader_iterator", None)
        record = self.resumed if self.resumed.get("iter") == runner.iter else {}
        self.seed, self.round = int(runner.seed), 0
        sampler = sampler_of(loader)
        if "sampler_seed" in record and hasattr(sampler, "seed"):
            sampler.seed = record["sampler_seed"]
        self.attach(loader)
        if iterator is None:
            # another number of processes or another batch size: the same share of the epoch
            self.skip = record.get("batches", 0) * len(loader) // record.get("epoch_batches", 1)
            return
        # An iteration-based loop has begun to load before any hook was called, and counts its own way forward.
        if hasattr(sampler, "_indices_of_rank"):
            sampler.indices = sampler._indices_of_rank()
        loader._iterator = None
        loop.dataloader_iterator = type(iterator)(loader)

    def attach(self, loader: DataLoader) -> None:
        """Give every batch of a loader its key."""
        batches = loader.batch_sampler
        if batches is None or hasattr(batches, "replay"):
            return
        batches.replay = self
        batches.__class__ = replayed(type(batches))  # torch lets nobody exchange the batch sampler of a loader
        if hasattr(loader.dataset, "__dict__"):  # a plain list has nothing random about it
            loader.dataset.__getitems__ = SeededFetch(loader.dataset)

    def start_epoch(self, runner: Runner) -> None:
        """Name the epoch that the next batches are of."""
        self.done = self.skip
        if getattr(runner.train_loop, "dataloader_iterator", None) is None:
            self.round = runner.epoch

    def start_step(self, runner: Runner) -> None:
        """Set the random state that the next training step starts from."""
        seed_everything(int(runner.seed), STEP, runner.iter)

    def end_step(self) -> None:
        """Count a batch."""
        self.done += 1

    def end_epoch(self) -> None:
        """Begin to count anew."""
        self.done = 0


def sampler_of(loader: DataLoader) -> object:
    """Return what decides the order of the data."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
