"""KCLA: a running mean of the stage's maps, weighted by the norm of their keys."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mrla_mm import functional
from mrla_mm.attention.base import Attended, LayerAttention, Memory, run_projection
from mrla_mm.registry import MODELS

EPSILON = 1e-3  # beside the sum of the weights in o^t
fx.wrap("log_weights")  # torch.fx calls it as a whole: it depends on the device and the precision


@MODELS.register_module()
class KCLA(LayerAttention):
    """Key-norm cross-layer attention inside a stage (arXiv 2606.28405).

        w^t = exp(min(a |k^t|, 10)),  Z^t = sum_{s<=t} w^s,  A^t = sum_{s<=t} w^s x^s / Z^t
        o^t = sigmoid(Phi^t [q^t . k^t / |k^t|]) Z^t / (Z^t + 1e-3) f_V(A^t)

    per head, a fixed, Phi a linear layer over the heads, and a ReLU after the norm of the branch,
    which therefore cannot start at zero. The memory is A (B, C, H, W) and log Z (B, G). What the
    authors' versions do between stages is left out: they disagree. Arguments are those of
    `LayerAttention`.
    """

    activation = nn.ReLU
    default_head_channels = 64

    def __init__(self, channels: int, head_channels: int | None = None, **kwargs: object) -> None:
        super().__init__(channels, head_channels, **kwargs)
        self.mix = nn.Linear(self.heads, self.heads, bias=False)

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        query, key = self.query_and_key(x)  # (B, G, D)
        log_weight = log_weights(key)  # (B, G)
        mean = x
        log_total = log_weight
        if memory:
            mean, log_total = memory
            gained = log_weight - log_total  # at most 10
            log_total = log_weight - F.logsigmoid(gained)  # log(w + Z)
            step = functional.expand_heads(gained.sigmoid(), self.channels)
            mean = torch.lerp(mean.to(x.dtype), x, functional.on_map(step, x))
        gate = run_projection(self.mix, (query * F.normalize(key, dim=-1)).sum(-1)).sigmoid()
        gate = gate * (log_total - math.log(EPSILON)).sigmoid()  # Z / (Z + EPSILON)
        gate = functional.expand_heads(gate, self.channels)
        return self.scaled_value(mean, gate), (mean, log_total)


def log_weights(key: Tensor) -> Tensor:
    """min(a |k|, 10), a from 0.7 to 1 / 0.7 in equal ratios over the heads: (B, G, D) -> (B, G)."""
    norm = key.norm(dim=-1)
    options = dict(dtype=norm.dtype, device=norm.device)
    slope = torch.linspace(math.log(0.7), -math.log(0.7), norm.shape[1], **options).exp()
    return (slope * norm).clamp(max=10)
