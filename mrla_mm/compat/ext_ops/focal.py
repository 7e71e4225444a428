"""Sigmoid focal loss (Lin et al., ICCV 2017)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrla_mm.compat.ext_ops.common import compute_dtype

CHUNK = 1 << 22  # scores computed at a time, which bounds the memory of intermediate results


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the loss of every score into ``output`` (N, C).

    With p = sigmoid(x): -alpha (1 - p)^gamma log(p) where c is the target, -(1 - alpha) p^gamma
    log(1 - p) elsewhere.

    Args:
        input: (N, C) logits.
        target: (N,) classes; C is background.
        weight: (C,) factor for each target class, or empty; background has 1.
        output: (N, C), written.
        gamma: how much hard examples count.
        alpha: weight of the foreground.
    """
    for part, hit, x in _score_chunks(input, target):
        signed = torch.where(hit, x, -x)  # the right answer has the probability sigmoid(signed)
        balance = torch.where(hit, alpha, 1 - alpha)
        loss = -balance * torch.sigmoid(-signed) ** gamma * logsigmoid(signed)
        output[part] = _weigh(loss, target[part], weight).to(output.dtype)


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivative of each loss with respect to its logit into ``grad_input`` (N, C).

    With s = x where c is the target and -x elsewhere, p = sigmoid(s): dL/ds = b (1 - p)^gamma
    (gamma p log(p) + p - 1).
    """
    for part, hit, x in _score_chunks(input, target):
        signed = torch.where(hit, x, -x)
        balance = torch.where(hit, alpha, alpha - 1)  # ds/dx is -1 off the target
        miss = torch.sigmoid(-signed)
        grad = balance * miss**gamma * (gamma * torch.sigmoid(signed) * logsigmoid(signed) - miss)
        grad_input[part] = _weigh(grad, target[part], weight).to(grad_input.dtype)


def _score_chunks(input: Tensor, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of rows with their targets, one-hot, and logits, both (n, C)."""
    classes = torch.arange(input.shape[1], device=input.device)
    step = max(1, CHUNK // max(1, input.shape[1]))
    for start in range(0, len(input), step):
        part = slice(start, start + step)
        yield part, target[part, None] == classes, input[part].to(compute_dtype(input))


def _weigh(values: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``values`` (n, C) by the weight of each row's target; background's is one."""
    if weight.numel() == 0:
        return values
    known = (target >= 0) & (target < len(weight))
    factor = weight.to(values.dtype)[target.clamp(0, len(weight) - 1)]
    return values * torch.where(known, factor, 1)[:, None]
