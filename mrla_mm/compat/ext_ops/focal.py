"""Focal loss (Lin et al., ICCV 2017) on sigmoid and softmax scores."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrla_mm.compat.ext_ops.common import compute_dtype

CHUNK = 1 << 22  # scores handled at a time, which bounds the memory of the intermediate results


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the loss of every score into ``output`` (N, C).

    With p = sigmoid(x): -alpha (1 - p)^gamma log(p) where c is the target, -(1 - alpha) p^gamma log(1 - p) elsewhere.

    Args:
        input: (N, C) logits.
        target: (N,) classes; C means background.
        weight: (C,) factor by target class, or empty; background has 1.
        output: written.
        gamma: focus on hard examples.
        alpha: weight of the foreground.
    """
    for part, hit, x in _score_chunks(input, target):
        signed = torch.where(hit, x, -x)  # p of the right answer is sigmoid(signed) in both cases
        balance = torch.where(hit, alpha, 1 - alpha)
        loss = -balance * torch.sigmoid(-signed) ** gamma * logsigmoid(signed)
        output[part] = _weigh(loss, target[part], weight).to(output.dtype)


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivative of each loss by its logit into ``grad_input`` (N, C).

    With s = x where c is the target and -x elsewhere, p = sigmoid(s): dL/ds = b (1 - p)^gamma (gamma p log(p) + p - 1).
    """
    for part, hit, x in _score_chunks(input, target):
        signed = torch.where(hit, x, -x)
        balance = torch.where(hit, alpha, alpha - 1)  # ds/dx is -1 off the target
        miss = torch.sigmoid(-signed)
        grad = balance * miss**gamma * (gamma * torch.sigmoid(signed) * logsigmoid(signed) - miss)
        grad_input[part] = _weigh(grad, target[part], weight).to(grad_input.dtype)


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write -alpha (1 - p)^gamma log(p) of each target's probability into ``output`` (N,); 0 where target < 0.

    ``input``: (N, C) probabilities. ``weight``: (C,) factor by target class, or empty.
    """
    p, log_p = _target_probability(input, target)
    loss = -alpha * (1 - p) ** gamma * log_p
    output.copy_(_weigh(loss[:, None], target, weight)[:, 0] * (target >= 0))


def softmax_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivative of each loss by the logits into ``grad_input`` (N, C).

    dL/dx_c = dL/dlog(p_t) (1[c = t] - p_c), its first factor going to ``buff`` (N,).
    """
    p, log_p = _target_probability(input, target)
    by_log_p = -alpha * (1 - p) ** gamma
    if gamma:  # (1 - p)^(gamma - 1) is infinite at p = 1 for gamma below 1, where the product tends to 0
        slope = gamma * (1 - p).clamp(min=torch.finfo(p.dtype).tiny) ** (gamma - 1)
        by_log_p = by_log_p + alpha * slope * p * log_p
    buff.copy_(_weigh(by_log_p[:, None], target, weight)[:, 0] * (target >= 0))
    hit = target[:, None] == torch.arange(input.shape[1], device=input.device)
    grad_input.copy_(buff.to(p.dtype)[:, None] * (hit.to(p.dtype) - input))


def _score_chunks(input: Tensor, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the rows, with where the class is the target and the logits of each, (n, C)."""
    classes = torch.arange(input.shape[1], device=input.device)
    step = max(1, CHUNK // max(1, input.shape[1]))
    for start in range(0, len(input), step):
        part = slice(start, start + step)
        yield part, target[part, None] == classes, input[part].to(compute_dtype(input))


def _weigh(values: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """``values`` (n, C) times the weight of each row's target class; rows of no class keep theirs."""
    if weight.numel() == 0:
        return values
    known = (target >= 0) & (target < len(weight))
    factor = weight.to(values.dtype)[target.clamp(0, len(weight) - 1)]
    return values * torch.where(known, factor, 1)[:, None]


def _target_probability(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(input)
    p = input.gather(1, target.clamp(min=0)[:, None])[:, 0].to(dtype)
    return p, p.clamp(min=torch.finfo(dtype).tiny).log()
