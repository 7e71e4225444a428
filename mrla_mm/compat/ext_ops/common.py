"""What the stand-in ops share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DIVERGED = "the training diverged: go back to an earlier checkpoint, with a lower learning rate"


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def compute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run ``run(*inputs)`` in the dtype to compute in."""
    return run(*(tensor.to(compute_dtype(tensor)) for tensor in inputs))


def write_gradients(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    buffers: Sequence[Tensor | None],
    grad_output: Tensor,
) -> None:
    """Run ``run(*inputs)`` again and write the gradients that have a buffer."""
    with torch.enable_grad():
        leaves = [tensor.detach().to(compute_dtype(tensor)).requires_grad_() for tensor in inputs]
        output = run(*leaves)
        grads = torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
    for grad, buffer in zip(grads, buffers, strict=True):
        if buffer is not None:
            buffer.copy_(grad)
