"""Layer-wise learning rate decay for detectors whose backbone knows the depth of its parameters."""

from functools import partial

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class LayerDecayOptimWrapperConstructor(LearningRateDecayOptimWrapperConstructor):
    """Gives each block of a backbone the rate lr * layer_decay_rate ** (blocks behind it).

    mmpretrain's constructor asks the model for the depth of its parameters; this one asks a
    detector's backbone. Heads and necks keep the full rate. Takes the same `paramwise_cfg`.
    """

    def add_params(self, params, module, prefix="", get_layer_depth=None, **kwargs) -> None:
        """Append the module's parameters to params, one group each."""
        if get_layer_depth is None and not hasattr(module, "get_layer_depth"):
            get_layer_depth = partial(module.backbone.get_layer_depth, prefix=f"{prefix}backbone.")
        super().add_params(params, module, prefix, get_layer_depth, **kwargs)
