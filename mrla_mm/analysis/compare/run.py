"""What a run of a comparison does in its process: train and test a config from a seed."""

import json
import resource
import statistics
import sys
from numbers import Number
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed
from torch import Tensor

from mrla_mm.analysis.compare.plan import RESULT, TRAINED, Run, config_file
from mrla_mm.atomic import write_atomically
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from mrla_mm.inference import build_model
from mrla_mm.training import build_runner, last_checkpoint, resume_from, train


def initial_weights(cfg: Config, seed: int) -> tuple[dict[str, Tensor], set[str]]:
    """Return the weights that a model starts with, and the keys of those that the seed decides."""
    states = []
    for each in (seed + 1, seed):
        set_random_seed(each)
        model = build_model(cfg)
        model.init_weights()
        states.append(model.state_dict())
    other_state, state = states
    return state, {key for key in state if not torch.equal(state[key], other_state[key])}


def shared_weights(cfg: Config, first: Config, seed: int) -> dict[str, Tensor]:
    """Return a model's initial weights, with the first model's random tensors where both have them.

    Weights that are constant or pretrained in either model stay as its own config says.
    """
    weights, drawn = initial_weights(cfg, seed)
    of_first, drawn_by_first = initial_weights(first, seed)
    for key in drawn & drawn_by_first:
        if weights[key].shape == of_first[key].shape:
            weights[key] = of_first[key]
    return weights


class ComparedRunHook(Hook):
    """Sets shared initial weights, seeds every iteration, and writes what the training cost.

    `OVERRIDES` of the plan are the other half of what makes runs repeatable.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        """Let a new run start from the first config's random weights.

        mmengine calls init_weights after this, and loads `load_from` after that.
        """
        if runner.cfg.resume:
            return
        first = Config(runner.cfg.share_weights_with)
        weights = shared_weights(runner.cfg, first, runner.seed)
        runner.model.init_weights = lambda: runner.model.load_state_dict(weights)

    def before_train(self, runner: Runner) -> None:
        """Let the loader's workers take their seeds from the main process, anew each epoch."""
        runner.train_dataloader.worker_init_fn = None

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed the first iteration of an epoch, which may be that of a resumed run."""
        seed_iteration(runner.seed, runner.iter)

    def after_train_iter(self, runner: Runner, *_: object, **__: object) -> None:
        """Seed the next iteration: all models see the same images, however much they draw."""
        seed_iteration(runner.seed, runner.iter + 1)

    def after_train(self, runner: Runner) -> None:
        """Write what the training cost, which also says that it has ended."""
        seconds, _ = runner.message_hub.get_scalar("train/time").data
        costs = {"parameters": sum(p.numel() for p in runner.model.parameters())}
        costs["seconds an iteration"] = float(statistics.median(seconds))
        costs["peak memory, MiB"] = peak_memory()
        write_atomically(Path(runner.work_dir) / TRAINED, json.dumps(costs).encode())


def seed_iteration(seed: int, iteration: int) -> None:
    """Seed an iteration: by seed and iteration alone, so that a resumed run draws the same."""
    set_random_seed((1_000_003 * seed + iteration) % 2**32)


def peak_memory() -> float:
    """Return the most memory in MiB that torch had on a GPU, or else this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def train_and_test(run: Run) -> None:
    """Finish a run: train unless that is done, test, and write the result."""
    folder = run.folder
    cfg = read_config(str(config_file(folder.parent)), {"randomness.seed": run.seed})
    cfg.launcher = "none"
    if not (folder / TRAINED).is_file():
        cfg.work_dir = str(folder)
        resume_from(cfg, last_checkpoint(folder))
        train(cfg, [ComparedRunHook()])
    metrics = test(cfg, folder)
    costs = json.loads((folder / TRAINED).read_text())
    result = dict(config=run.config, seed=run.seed, metrics=metrics, costs=costs)
    write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())


def test(cfg: Config, folder: Path) -> dict[str, float]:
    """Return the metrics of the last checkpoint in a folder; InputError if either is missing."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None or not Path(checkpoint).is_file():
        raise InputError(f"{folder} has no checkpoint any more: delete it to train again")
    cfg.update(load_from=checkpoint, resume=False, work_dir=str(folder / "test"))
    cfg.visualizer = None  # mmengine would reuse that of the training, which is closed
    evaluated = build_runner(cfg, "test").test()
    metrics = {key: float(value) for key, value in evaluated.items() if isinstance(value, Number)}
    if not metrics:
        raise InputError("the test returns no metric; mmdet does so if nothing is detected")
    return metrics
