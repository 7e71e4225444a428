"""Strictness for whole checkpoints: `load_from`, resuming and testing."""

from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, Runner, find_latest_checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mrla_mm.errors import InputError
from mrla_mm.registry import register
from mrla_mm.torch_support import add_safe_globals
from mrla_mm.weights.backbone import pretrained_entries
from mrla_mm.weights.files import SAFETENSORS, TRAIN_ALL, locate, read_file
from mrla_mm.weights.loading import match
from mrla_mm.weights.states import BACKBONE, find_state, strip_prefix

# What changes in a scheduler's state as it goes on.
VARYING = {"last_step", "_global_step", "_last_value", "best", "cooldown_counter", "num_bad_epochs"}


@register(HOOKS)
class CheckpointCheckHook(Hook):
    """Refuses a checkpoint that mmengine would load only in part, or not at all, with a warning.

    What is tested or resumed must match its model entirely, and its data number the classes alike.
    A training that starts from a checkpoint may have other heads, but its backbone must match;
    plain weights, without layer attention, are accepted too. A training whose backbone starts from
    random weights and keeps part of them gets a warning.
    """

    priority = "VERY_HIGH"  # before an EMAHook loads the average from the same file

    def before_run(self, runner: Runner) -> None:
        """Look at the file that mmengine is about to load, which may execute what it holds.

        The log history in it names the statistics that a project has registered.
        """
        statistics = HistoryBuffer._statistics_methods.values()
        add_safe_globals([(each, f"{each.__module__}.{each.__qualname__}") for each in statistics])
        location = runner._load_from
        if runner._resume and not location:
            location = find_latest_checkpoint(runner.work_dir)
        path = locate(location) if location else None
        if path is None:  # nothing is loaded, or mmengine's backends read it
            return
        if path.suffix == SAFETENSORS:
            raise InputError(f"load_from={path}: only init_cfg reads {SAFETENSORS} files")
        read_file(path)
        if runner._load_from:
            runner._load_from = str(path)  # mmengine would download a URL anew

    def before_train(self, runner: Runner) -> None:
        """Warn of layers that start from random weights and never learn."""
        model = bare(runner.model)
        backbone = getattr(model, "backbone", None)
        starts = [*pretrained_entries(model), *pretrained_entries(backbone)]
        if backbone is None or runner._has_loaded or starts:
            return
        has_norms = any(isinstance(module, _BatchNorm) for module in backbone.modules())
        frozen = not all(parameter.requires_grad for parameter in backbone.parameters())
        if frozen or (has_norms and getattr(backbone, "norm_eval", False)):
            runner.logger.warning(
                "THE BACKBONE STARTS FROM RANDOM WEIGHTS AND KEEPS PART OF THEM AS IT IS. Give "
                "pretrained weights (model.backbone.init_cfg or load_from), or train all of it: "
                f"{TRAIN_ALL}"
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare the checkpoint that was read with the model that it is for.

        Its state dict, from whichever entry and wrapper, is put where mmengine looks for it.
        """
        model = bare(runner.model)
        source = find_state(checkpoint, prefix="")
        checkpoint["state_dict"] = strip_prefix(source.state, "")  # a copy: the next line renames
        rename_as_host(model, source.state)
        location = str(runner._load_from or f"in {runner.work_dir}")
        training = isinstance(runner._train_loop, BaseLoop)
        starting = training and not runner._resume
        report = match(model, source, location, exact=not starting)
        report.check(BACKBONE if starting else "")
        if starting:
            report.log()
            return
        check_class_order(runner, checkpoint.get("meta") or {})
        if training:
            warn_of_schedules(runner, checkpoint.get("param_schedulers"))


def rename_as_host(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Let a model rename keys in place as it does to load them, such as for teacher and student."""
    local_metadata = {}
    model._load_from_state_dict(state, "", local_metadata, False, [], [], [])


def check_class_order(runner: Runner, meta: dict) -> None:
    """Raise InputError if a data set numbers the classes of a checkpoint in another order."""
    trained = list((meta.get("dataset_meta") or {}).get("classes") or ())
    for loop in (runner._train_loop, runner._val_loop, runner._test_loop):
        dataset = loop.dataloader.dataset if isinstance(loop, BaseLoop) else None
        classes = list((getattr(dataset, "metainfo", None) or {}).get("classes") or ())
        if classes != trained and set(classes) == set(trained):
            told = f"the checkpoint was trained with metainfo.classes={trained}"
            raise InputError(f"{told}, the data set has {classes}: bring both into one order")


def warn_of_schedules(runner: Runner, saved: list[dict] | dict | None) -> None:
    """Warn of schedulers that go on as the checkpoint's run had them, not as the config says."""
    schedulers = runner.param_schedulers if isinstance(saved, list) else None
    for number, (scheduler, state) in enumerate(zip(schedulers or (), saved or (), strict=False)):
        planned = scheduler.state_dict()
        settings = [key for key in planned if key not in VARYING]
        changed = [key for key in settings if planned[key] != state.get(key, planned[key])]
        if changed:
            told = f"RESUMING: param_scheduler.{number} KEEPS THE CHECKPOINT'S {', '.join(changed)}"
            runner.logger.warning(f"{told}. For the config's, start anew: load_from, no resume")


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers for distribution and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model
