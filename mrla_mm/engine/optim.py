"""Optimization of detectors: layer-wise decay of the learning rate, and mixed precision on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor
from torch import nn


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(LearningRateDecayOptimWrapperConstructor):
    """Give each block of a backbone its own learning rate, lr * layer_decay_rate ** (blocks behind it).

    mmpretrain's constructor wants a model that knows the depth of its parameters; this one asks a detector's backbone.
    Heads and necks keep the full rate. Takes the same `paramwise_cfg`.
    """

    def add_params(
        self,
        params: list[dict],
        module: nn.Module,
        prefix: str = "",
        get_layer_depth: Callable[[str], tuple[int, int]] | None = None,
        **kwargs: object,
    ) -> None:
        """Append the module's parameters to params, one group each; see mmpretrain's constructor."""
        if get_layer_depth is None and not hasattr(module, "get_layer_depth"):
            get_layer_depth = partial(module.backbone.get_layer_depth, prefix=f"{prefix}backbone.")
        super().add_params(params, module, prefix, get_layer_depth, **kwargs)


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Trains in mixed precision with bfloat16 on whatever device the model is on; mmengine's refuses a CPU.

    bfloat16 has the range of float32, so the loss is not scaled. Takes the arguments of mmengine's ``OptimWrapper``.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a model in bfloat16 where torch's autocast does."""
        device = next(model.parameters()).device.type
        with super().optim_context(model), torch.autocast(device, dtype=torch.bfloat16):
            yield
