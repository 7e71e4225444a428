"""The strictness of `init_cfg` for whole checkpoints: `load_from`, resuming and testing."""

from pathlib import Path

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from mrla_mm.errors import InputError
from mrla_mm.weights.checks import named_by
from mrla_mm.weights.loading import LoadReport, explain, match
from mrla_mm.weights.states import BACKBONE, enter, unwrap


@HOOKS.register_module()
class CheckpointCheckHook(Hook):
    """Refuses a checkpoint that mmengine would load in part, or not at all, with a mere warning.

    What is tested or resumed must match its model entirely. A training that starts from a checkpoint may have other
    heads than it, but the backbone must match; plain weights for a backbone with layer attention do.

    Raises:
        InputError: before anything is loaded; names the first keys of both sides.
    """

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare the checkpoint that was read with the model that it is for."""
        if Path(str(runner._load_from)).is_dir():  # FSDP: a part of all parameters in one, without their names
            return
        model = bare(runner.model)
        content, entries = enter(checkpoint, None)
        state, others, _ = unwrap(content)
        report = LoadReport(type(model).__name__, str(runner._load_from), f"entry {'.'.join(entries) or 'none'}")
        match(model, state, report, others=others)
        if isinstance(runner.model, FullyShardedDataParallel):
            report.mismatched.clear()  # a process has a part of each tensor; torch compares the whole ones
        training = isinstance(runner._train_loop, BaseLoop)
        if not training or runner._resume:
            report.missing += report.fresh
            report.unexpected += report.unused
            faults = report.faults()
        else:
            faults = report.faults(BACKBONE) or ([] if report.matched else ["no key matches"])
        if faults:
            key = named_by(training=training, resuming=runner._resume)
            raise InputError(f"{key}: {explain(model, state, report, faults)}")
        if training and not runner._resume:
            print_log(report.table(), logger="current")


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers for distribution and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model
