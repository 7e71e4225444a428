"""What the stand-in ops share."""

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def torchvision_ops():
    """Return ``torchvision.ops``, imported when an op first needs it, so that everything else works without it.

    Raises:
        RuntimeError: torchvision is missing or was built for another torch.
    """
    try:
        import torchvision.ops
    except Exception as error:  # a build for another torch can fail in any way
        raise RuntimeError(
            f"torchvision does not import ({error}); mrla_mm's stand-in ops need it: "
            f"install the torchvision build that belongs to torch {torch.__version__}"
        ) from error
    return torchvision.ops
