"""Layer-wise learning rate decay for detectors whose backbone knows the depth of its parameters."""

from collections.abc import Callable
from functools import partial

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor
from torch import nn

from mrla_mm.errors import InputError


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(LearningRateDecayOptimWrapperConstructor):
    """Give each block of a backbone its own learning rate, lr * layer_decay_rate ** (blocks behind it).

    mmpretrain's constructor, which wants a model that knows the depth of its parameters, for the models of every
    OpenMMLab package: it asks their backbone. Heads and necks keep the full rate. Takes the same `paramwise_cfg`.

    Raises:
        InputError: if neither the model nor its backbone has a method `get_layer_depth`, or the optimizer's config no
            learning rate or weight decay of its own for the parameters to have a share of.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        optimizer = optim_wrapper_cfg.get("optimizer") or {}
        for name, note in (("lr", ""), ("weight_decay", " (0 for none)")):
            if optimizer.get(name) is None:
                raise InputError(
                    f"optimizer.{name} is not given, of which layer-wise decay gives each parameter a share; set "
                    f"optim_wrapper.optimizer.{name}{note}"
                )
        super().__init__(optim_wrapper_cfg, paramwise_cfg)

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
                    f"{type(module).__name__} with the backbone {type(backbone).__name__} cannot say how deep its "
                    "parameters are; drop optim_wrapper.constructor, or use a backbone such as MRLAViT"
                )
            get_layer_depth = partial(backbone.get_layer_depth, prefix=f"{prefix}backbone.")
        super().add_params(params, module, prefix, get_layer_depth, **kwargs)
