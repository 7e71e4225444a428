"""Layer-wise learning rate decay for detectors whose backbone knows the depth of its parameters."""

from collections.abc import Callable
from functools import partial

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor
from torch import nn

from mrla_mm.errors import InputError


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class LayerDecayOptimWrapperConstructor(LearningRateDecayOptimWrapperConstructor):
    """Give each block of a backbone its own learning rate, lr * layer_decay_rate ** (blocks behind it).

    mmpretrain's constructor wants a model that knows the depth of its parameters; this one asks a detector's backbone.
    Heads and necks keep the full rate. Takes the same `paramwise_cfg`.

    Raises:
        InputError: neither the model nor its backbone has a method `get_layer_depth`.
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
            backbone = getattr(module, "backbone", None)
            if not hasattr(backbone, "get_layer_depth"):
                raise InputError(
                    f"{type(backbone).__name__} cannot say how deep its parameters are; drop "
                    "optim_wrapper.constructor, or use a backbone such as MRLAViT"
                )
            get_layer_depth = partial(backbone.get_layer_depth, prefix=f"{prefix}backbone.")
        super().add_params(params, module, prefix, get_layer_depth, **kwargs)
