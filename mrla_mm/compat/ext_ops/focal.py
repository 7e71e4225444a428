"""Sigmoid focal loss (Lin et al., ICCV 2017)."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrla_mm.compat.ext_ops.common import compute_dtype, write_gradients

CHUNK = 1 << 22  # scores computed at a time, which bounds the memory of intermediate results


def sigmoid_focal_loss_forward(input, target, weight, output, gamma, alpha) -> None:
    """Write the loss of every score into ``output`` (N, C).

    With p = sigmoid(x): -alpha (1 - p)^gamma log(p) where c is the target, -(1 - alpha) p^gamma
    log(1 - p) elsewhere. The ``target`` (N,) of background is C; ``weight`` (C,) has a factor for
    each target class, background's is 1, or it is empty.
    """
    for logits, targets, out in _chunks(input, target, output):
        out.copy_(_losses(logits.to(compute_dtype(input)), targets, weight, gamma, alpha))


def sigmoid_focal_loss_backward(input, target, weight, grad_input, gamma, alpha) -> None:
    """Write the derivative of each loss with respect to its logit into ``grad_input`` (N, C)."""
    for logits, targets, grad in _chunks(input, target, grad_input):
        run = partial(_losses, target=targets, weight=weight, gamma=gamma, alpha=alpha)
        write_gradients(run, [logits], [grad], torch.ones_like(logits))


def _chunks(input: Tensor, *more: Tensor):
    step = max(1, CHUNK // max(1, input.shape[1]))
    return zip(*(tensor.split(step) for tensor in (input, *more)), strict=True)


def _losses(logits: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    hit = target[:, None] == torch.arange(logits.shape[1], device=logits.device)
    signed = torch.where(hit, logits, -logits)  # the right answer has the probability p(signed)
    # (1 - p)^gamma as an exponential, whose derivative is finite for every gamma
    losses = -torch.exp(gamma * logsigmoid(-signed)) * logsigmoid(signed)
    losses = losses * torch.where(hit, alpha, 1 - alpha)
    if weight.numel() == 0:
        return losses
    return losses * torch.cat([weight, weight.new_ones(1)])[target, None]
