"""Softmax layer attention: MRLA-base, which keeps keys and values, and MLA, which derives them."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, fx

from mrla_mm.attention.base import LayerAttention, Memory
from mrla_mm.ops import global_average, softmax_scores, weighted_sum

# torch.fx calls these as a whole: they depend on the precision or loop over layers
fx.wrap("global_average")
fx.wrap("softmax_scores")
fx.wrap("weighted_sum")


@MODELS.register_module()
class MRLABase(LayerAttention):
    """MRLA-base, o^t_h = sum_{s<=t} softmax_s(q^t_h . k^s_h / sqrt(D)) v^s_h (Eq. 6, Algorithm 1).

    The memory is the keys (B, T, E), E = G * D, and the T values (B, C, H, W) of the layers so far.
    Each value is kept once and never concatenated, so memory grows linearly with the depth of the
    stage. Arguments are those of `LayerAttention`.
    """

    def forward(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()
    ) -> tuple[Tensor, Memory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        query, key = self.query_and_key(x)  # (B, G, D)
        keys = key.flatten(1).unsqueeze(1)  # (B, 1, E)
        values = [self.project_value(x)]
        if memory:
            earlier_keys, *earlier_values = memory
            keys = torch.cat((earlier_keys, keys), 1)  # (B, T, E)
            values = earlier_values + values
        split_keys = keys.unflatten(2, query.shape[1:]).unbind(1)  # T of (B, G, D)
        scores = softmax_scores(query, split_keys)  # (B, G, T)
        return weighted_sum(scores, values), (keys, *values)


@MODELS.register_module()
class MLA(LayerAttention):
    """Multi-head layer attention: as MRLA-base, but with f_K and f_V of its own for every x^s.

    Eq. 4; quadratic in the depth of the stage, in time and in memory. The memory is the maps x^s
    (B, C, H, W) of the layers so far. Arguments are those of `LayerAttention`.
    """

    def forward(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()
    ) -> tuple[Tensor, Memory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        maps = (*memory, x)
        pooled = [global_average(m) for m in maps]  # T of (B, C)
        keys = [self.project_key(y) for y in pooled]  # T of (B, G, D)
        values = [self.project_value(m) for m in maps]  # T of (B, C, H, W)
        scores = softmax_scores(self.project_query(pooled[-1]), keys)  # (B, G, T)
        return weighted_sum(scores, values), maps
