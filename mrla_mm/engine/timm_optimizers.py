"""Optimizers of timm by name, for recipes that were written for it."""

from mmengine.registry import OPTIMIZERS
from torch.optim import Optimizer

from mrla_mm.errors import InputError
from mrla_mm.registry import register


@register(OPTIMIZERS, "TimmRMSpropTF")
def timm_rmsprop_tf(params, **options: object) -> Optimizer:
    """Build timm's RMSpropTF, which computes as TensorFlow's RMSProp does.

    Its average of squared gradients starts at 1, where torch's starts at 0 and makes the first
    steps far larger; eps is added inside the square root, and momentum remembers the learning rate
    of each step. Takes timm's arguments. Raises InputError if timm is not installed.
    """
    try:
        from timm.optim import RMSpropTF
    except ImportError as error:
        remedy = "run `pip install timm`, or choose another optim_wrapper.optimizer"
        raise InputError(f"optimizer TimmRMSpropTF is timm's: {remedy}") from error
    return RMSpropTF(params, **options)
