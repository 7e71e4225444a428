"""Softmax layer attention: MRLA-base, which keeps keys and values, and MLA, which derives them."""

import torch
from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm import functional
from mrla_mm.attention.base import Attended, LayerAttention, Memory
from mrla_mm.registry import register


@register(MODELS)
class MRLABase(LayerAttention):
    """MRLA-base, o^t_h = sum_{s<=t} softmax_s(q^t_h . k^s_h / sqrt(D)) v^s_h (Eq. 6, Algorithm 1).

    The memory is the keys (B, T, E), E = G * D, and the T values (B, C, H, W) of the layers so far.
    Each value is kept once and never concatenated, so memory grows linearly with depth. Arguments
    are those of `LayerAttention`.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        weights, keys, values = self.attention_weights(x, memory)
        return functional.weighted_sum(weights, values), (keys, *values)

    def add_to(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory, scale: Tensor, offset: Tensor
    ) -> Attended:
        """Return x + scale out + offset, and the memory; see `LayerAttention`.

        y = x + offset + sum_s (scale weight^s) v^s.
        """
        weights, keys, values = self.attention_weights(x, memory)
        weights = weights * scale.unsqueeze(1)
        return x + functional.weighted_sum(weights, values, offset), (keys, *values)

    def attention_weights(
        self, x: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Weights (B, T, C), keys (B, T, E) and T values (B, C, H, W) of the layers so far."""
        query, key = self.query_and_key(x)  # (B, G, D)
        earlier_keys, *earlier_values = memory or (None,)
        scores, keys = functional.scores_and_keys(query, key, earlier_keys)
        values = (*earlier_values, self.project_value(x))
        return functional.expand_heads(scores, self.channels), keys, values


@register(MODELS)
class MLA(LayerAttention):
    """Multi-head layer attention: as MRLA-base, but with f_K and f_V of its own for every x^s.

    Eq. 4, o^t_h = f_V^t(sum_{s<=t} softmax_s(q^t_h . f_K^t(y^s)_h / sqrt(D)) x^s_h): a linear f_V
    comes after the sum, which is the same. Any other projects every x^s. The memory is the averages
    y^s (B, T, C) and the T maps x^s (B, C, H, W) of the layers so far. Arguments are those of
    `LayerAttention`.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        weights, averages, maps = self.attention_weights(x, memory)
        if self.value_is_linear():
            out = self.project_value(functional.weighted_sum(weights, maps))
        else:
            out = functional.weighted_sum(weights, [self.project_value(m) for m in maps])
        return out, (averages, *maps)

    def add_to(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory, scale: Tensor, offset: Tensor
    ) -> Attended:
        """Return x + scale out + offset, and the memory; see `LayerAttention`."""
        if not self.value_is_depthwise():
            return super().add_to(x, shortcut, memory, scale, offset)
        weights, averages, maps = self.attention_weights(x, memory)
        mixed = functional.weighted_sum(weights, maps)
        y = x + self.scaled_value(mixed, scale, offset)
        return y, (averages, *maps)

    def attention_weights(
        self, x: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Weights (B, T, C), averages (B, T, C) and T maps (B, C, H, W) of the layers so far."""
        pooled = functional.global_average(x).unsqueeze(1)  # (B, 1, C)
        averages, maps = pooled, (x,)
        if memory:
            averages = torch.cat((memory[0], pooled), 1)
            maps = (*memory[1:], x)
        keys = self.project_key(averages.flatten(0, 1))  # (B * T, G, D), by this layer's f_K
        keys = keys.unflatten(0, (-1, averages.shape[1]))
        query = self.project_query(pooled.squeeze(1))
        scores = functional.softmax_scores(query, keys)
        return functional.expand_heads(scores, self.channels), averages, maps

    def value_is_linear(self) -> bool:
        """Whether f_V is linear in each channel: what our class builds, and without a GELU."""
        is_identity = self.value is None and self.value_is_plain()
        return is_identity or self.value_is_depthwise()
