"""Random numbers and data order that a resumed run repeats exactly.

mmengine restores epoch, iteration and seed. After a resume four things differ from the
uninterrupted run: the random state of the process (what RoI samplers, drop path and mixup draw),
that of the loader's workers, the samplers' seed if the config names none, and the place within an
epoch.

Here nothing random depends on what ran before. Every step starts from random states that are a
function of (seed, iteration); every batch is loaded from states that are a function of (seed, rank,
epoch, number of the batch).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

DATA, STEP = 0, 1  # the two streams of random numbers


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Makes a resumed run repeat the uninterrupted one: data order, augmentation and every random number.

    Also from within an epoch, whatever the number of workers. It reseeds all generators at each
    step and takes over the batch sampler and the data set of the training, so it is for whoever
    asks for it: ``custom_hooks=[dict(type="ExactResumeHook")]``, in the first run already.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.round = 0  # epochs, or starts of the loader where there are none
        self.skip = 0  # batches of the round that were trained on before the run was interrupted
        self.done = 0  # batches of the epoch
        self.resumed: dict = {}

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add the place in the data to a checkpoint."""
        loader = runner.train_loop.dataloader
        record = dict(iter=checkpoint["meta"]["iter"], batches=self.done, epoch_batches=len(loader))
        record["sampler_seed"] = getattr(sampler_of(loader), "seed", None)
        checkpoint["meta"]["replay"] = record

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Take the place in the data from a checkpoint."""
        self.resumed = checkpoint.get("meta", {}).get("replay", {})

    def before_train(self, runner: Runner) -> None:
        """Take over the training's data loader where the run stands."""
        loop = runner.train_loop
        loader, sampler = loop.dataloader, sampler_of(loop.dataloader)
        record = self.resumed if self.resumed.get("iter") == runner.iter else {}
        self.seed, self.round = int(runner.seed), 0
        if record.get("sampler_seed") is not None:
            sampler.seed = record["sampler_seed"]
        batches = loader.batch_sampler
        if not hasattr(batches, "replay"):
            batches.replay = self
            batches.__class__ = replayed(
                type(batches)
            )  # torch allows no other batch sampler on a loader
            dataset = loader.dataset  # whose method torch calls in place of `dataset[index]`
            dataset.__getitems__ = partial(fetch, dataset, getattr(dataset, "__getitems__", None))
        iterator = getattr(loop, "dataloader_iterator", None)
        if iterator is None:
            # Another number of processes or another batch size goes on at the same share of the
            # epoch.
            self.skip = record.get("batches", 0) * len(loader) // record.get("epoch_batches", 1)
            return
        # A loop by iterations has begun to load before any hook was called, and skips what was done
        # by itself.
        if hasattr(sampler, "_indices_of_rank"):
            sampler.indices = sampler._indices_of_rank()
        loader._iterator = None
        loop.dataloader_iterator = type(iterator)(loader)

    def before_train_epoch(self, runner: Runner) -> None:
        """Name the epoch that the next batches are of."""
        self.done = self.skip
        if getattr(runner.train_loop, "dataloader_iterator", None) is None:
            self.round = runner.epoch

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch=None) -> None:
        """Set the random states that the step starts from."""
        seed_everything(self.seed, STEP, runner.iter)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        """Count a batch."""
        self.done += 1

    def after_train_epoch(self, runner: Runner) -> None:
        """Count the next epoch's from zero."""
        self.done = 0


def replayed(kind: type) -> type:
    """Return a class of batch samplers that key their batches, and leave out those already trained on."""

    class Replayed(kind):
        replay: ExactResumeHook

        def __iter__(self) -> Iterator[list]:
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


class SeededBatch(list):
    """The indices of a batch and the key of the random numbers it is loaded with."""

    key: tuple[int, ...]


def fetch(dataset: object, original: Callable | None, indices: Sequence[int]) -> list:
    """Return the samples of a batch, loaded from its own random state; `original` is the data set's own method."""
    if isinstance(indices, SeededBatch):
        seed_everything(*indices.key)
    return original(indices) if original else [dataset[index] for index in indices]


def seed_everything(*key: int) -> None:
    """Set the random states of Python, NumPy and torch (of all devices) to a function of the key."""
    words = np.random.SeedSequence(key).generate_state(8)
    random.seed(int(words[0]))
    np.random.seed(words[1:6])
    torch.manual_seed(int(words[6]) << 32 | int(words[7]))


def sampler_of(loader: object) -> object:
    """Return what decides the order of a loader's data."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
