"""Softmax layer attention: MRLA-base, which keeps keys and values, and MLA, which derives them."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, fx, nn

from mrla_mm.attention.base import Attended, LayerAttention, Memory, is_patched
from mrla_mm.ops import global_average, scores_and_keys, softmax_scores, weighted_sum

# torch.fx calls it as a whole: it loops over layers
fx.wrap("weighted_sum")


@MODELS.register_module()
class MRLABase(LayerAttention):
    """MRLA-base, o^t_h = sum_{s<=t} softmax_s(q^t_h . k^s_h / sqrt(D)) v^s_h (Eq. 6, Algorithm 1).

    The memory is the keys (B, T, E), E = G * D, and the T values (B, C, H, W) of the layers so far.
    Each value is kept once and never concatenated, so memory grows linearly with depth. Where it
    runs fused, torch.autograd.grad of a value lacks its own layer's share. Arguments are those of
    `LayerAttention`.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        query, key = self.query_and_key(x)  # (B, G, D)
        earlier_keys, *earlier_values = memory or (None,)
        values = *earlier_values, self.project_value(x)
        scores, keys = scores_and_keys(query, key, earlier_keys)  # (B, T, G), (B, T, E)
        return weighted_sum(scores, values), (keys, *values)


@MODELS.register_module()
class MLA(LayerAttention):
    """Multi-head layer attention: as MRLA-base, but with f_K and f_V of its own for every x^s.

    Eq. 4, o^t_h = f_V^t(sum_{s<=t} softmax_s(q^t_h . f_K^t(y^s)_h / sqrt(D)) x^s_h): a linear f_V
    comes after the sum, which is the same. Any other projects every x^s. The memory is the averages
    y^s (B, T, C) and the T maps x^s (B, C, H, W) of the layers so far. Arguments are those of
    `LayerAttention`.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        pooled = global_average(x)  # (B, C)
        averages = self.averages(pooled, memory)  # (B, T, C)
        maps = (*memory[1:], x)  # T of (B, C, H, W)
        scores = softmax_scores(self.project_query(pooled), self.project_keys(averages))
        if self.value_is_linear():
            out = self.project_value(weighted_sum(scores, maps))
        else:
            out = weighted_sum(scores, [self.project_value(m) for m in maps])
        return out, (averages, *maps)

    def averages(self, pooled: Tensor, memory: Memory) -> Tensor:
        """Averages of the earlier maps and of this one (B, C): (B, T, C)."""
        pooled = pooled.unsqueeze(1)
        return torch.cat((memory[0], pooled), 1) if memory else pooled

    def project_keys(self, averages: Tensor) -> Tensor:
        """Keys of all layers by this layer's f_K: (B, T, C) -> (B, T, G, D)."""
        keys = self.project_key(averages.flatten(0, 1))
        return keys.unflatten(0, (-1, averages.shape[1]))

    def value_is_linear(self) -> bool:
        """Whether f_V is linear in each channel: what our class builds, and without a GELU."""
        overridden = type(self).project_value is not LayerAttention.project_value
        if overridden or is_patched(self) or self.value_gelu:
            return False
        value = self.value
        if value is None:
            return True
        is_depthwise = type(value) is nn.Conv2d and value.groups == self.channels
        return is_depthwise and not is_patched(value)
