"""Strictness for whole checkpoints: `load_from`, resuming and testing."""

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mrla_mm.weights.backbone import pretrained_entries
from mrla_mm.weights.loading import match
from mrla_mm.weights.states import BACKBONE, compare_attention, find_state, trained_attention


@HOOKS.register_module()
class CheckpointCheckHook(Hook):
    """Refuses a checkpoint that mmengine would load in part, or not at all, with a mere warning.

    What is tested or resumed must match its model entirely. A training that starts from a
    checkpoint may have other heads, but its backbone must match; plain weights for a backbone with
    layer attention do. A training whose backbone starts from random weights and keeps part of them
    gets a warning.

    Raises:
        InputError: before anything is loaded; names the first keys that do not match.
    """

    def before_train(self, runner: Runner) -> None:
        """Warn of layers that start from random weights and never learn."""
        backbone = getattr(bare(runner.model), "backbone", None)
        starts = [
            runner._has_loaded,
            *pretrained_entries(bare(runner.model)),
            *pretrained_entries(backbone),
        ]
        if backbone is None or any(starts):
            return
        evaluated = getattr(backbone, "norm_eval", False) and any(
            isinstance(m, _BatchNorm) for m in backbone.modules()
        )
        if evaluated or not all(parameter.requires_grad for parameter in backbone.parameters()):
            runner.logger.warning(
                "THE BACKBONE STARTS FROM RANDOM WEIGHTS AND KEEPS PART OF THEM AS IT IS. Give pretrained weights "
                "(model.backbone.init_cfg or load_from), or train all of it: frozen_stages=-1, norm_eval=False"
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare the checkpoint that was read with the model that it is for."""
        model = bare(runner.model)
        source = find_state(checkpoint, prefix="")
        location = str(runner._load_from or f"in {runner.work_dir}")
        report, _ = match(model, source.state, location=location, origin=source.origin)
        starting = isinstance(runner._train_loop, BaseLoop) and not runner._resume
        if starting:
            faults = report.faults(BACKBONE) or ([] if report.matched else ["no key matches"])
        else:
            report.require_all()
            faults = report.faults()
        faults += compare_attention(getattr(model, "backbone", None), trained_attention(checkpoint))
        if faults:
            raise report.refusal(faults)
        if starting:
            print_log(report.table(), logger="current")


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers for distribution and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model
