"""The check of what a backbone is given to look at."""

import torch
from torch import Tensor

from mrla_mm.errors import InputError


def check_images(x: Tensor, channels: int) -> None:
    """Raise InputError unless x is a batch of images (B, channels, height, width) of floating-point numbers."""
    if torch.jit.is_tracing():  # where sizes are tensors
        return
    if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < 1:
        raise InputError(f"expected images of shape (B, {channels}, height, width), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise InputError(
            f"expected images of floating-point numbers, got {x.dtype}; convert and normalise them, as the "
            "data_preprocessor of a detector does"
        )
