"""Softmax layer attention: MRLA-base, which keeps keys and values, and MLA, which derives them anew."""

from typing import NamedTuple

import torch
from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention.base import LayerAttention
from mrla_mm.ops import global_average, softmax_scores, weighted_sum


class SoftmaxMemory(NamedTuple):
    """Keys (B, T, E), E = G * D, and T values (B, C, H, W), each kept once, of the stage's layers so far."""

    keys: Tensor | None = None
    values: tuple[Tensor, ...] = ()


class MLAMemory(NamedTuple):
    """Feature maps x^s (B, C, H, W) of the stage's layers so far."""

    maps: tuple[Tensor, ...] = ()


@MODELS.register_module()
class MRLABase(LayerAttention):
    """MRLA-base, o^t_h = sum_{s<=t} softmax_s(q^t_h . k^s_h / sqrt(D)) v^s_h (Eq. 6, Algorithm 1).

    Each value is kept once and never concatenated, so memory grows linearly with the depth of the
    stage. Arguments are those of `LayerAttention`.
    """

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: SoftmaxMemory | None = None
    ) -> tuple[Tensor, SoftmaxMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        earlier = memory or SoftmaxMemory()
        query, key = self.query_and_key(x)  # (B, G, D)
        own = key.flatten(1).unsqueeze(1)
        keys = own if earlier.keys is None else torch.cat((earlier.keys, own), 1)  # (B, T, E)
        memory = SoftmaxMemory(keys, (*earlier.values, self.project_value(x)))
        scores = softmax_scores(query, keys.unflatten(2, query.shape[1:]).unbind(1))  # (B, G, T)
        return weighted_sum(scores, memory.values), memory


@MODELS.register_module()
class MLA(LayerAttention):
    """Multi-head layer attention: as MRLA-base, but each layer applies its own f_K and f_V to every x^s (Eq. 4).

    Quadratic in the depth of the stage, in time and in memory. Arguments are those of
    `LayerAttention`.
    """

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: MLAMemory | None = None
    ) -> tuple[Tensor, MLAMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        memory = MLAMemory((*(memory or MLAMemory()).maps, x))
        pooled = [global_average(m) for m in memory.maps]  # T of (B, C)
        keys = [self.project_key(y) for y in pooled]  # T of (B, G, D)
        values = [self.project_value(m) for m in memory.maps]  # T of (B, C, H, W)
        scores = softmax_scores(self.project_query(pooled[-1]), keys)  # (B, G, T)
        return weighted_sum(scores, values), memory
