"""What the stand-in ops share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def write_gradients(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor | None],
    grad_output: Tensor,
) -> None:
    """Run ``run(*inputs)`` again and write the gradients that are ``wanted``."""
    with torch.enable_grad():
        leaves = [
            t.detach().to(compute_dtype(t)).requires_grad_(out is not None)
            for t, out in zip(inputs, wanted, strict=True)
        ]
        output = run(*leaves)
        pairs = [(leaf, out) for leaf, out in zip(leaves, wanted, strict=True) if out is not None]
        grads = torch.autograd.grad(
            output, [leaf for leaf, _ in pairs], grad_output.to(output.dtype)
        )
    for grad, (_, out) in zip(grads, pairs, strict=True):
        out.copy_(grad)


def torchvision_ops():
    """Return ``torchvision.ops``, imported when an op first needs it.

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
