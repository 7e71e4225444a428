"""Linearised recurrent layer attention, the paper's other variant of linear cost."""

from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm import functional
from mrla_mm.attention.base import Attended, LayerAttention, Memory
from mrla_mm.registry import register


@register(MODELS)
class LinearRLA(LayerAttention):
    """Linearised RLA, o^t = phi(q^t) U^t / (phi(q^t) Z^t) with phi = elu + 1, per head (App. A.3).

    The memory is the running sums over the layers so far, U (B, G, D, D, H, W) of phi(k)^T v and Z
    (B, G, D) of phi(k). Its size does not depend on the depth, but U is D times as large as a
    feature map: prefer small heads. Arguments are those of `LayerAttention`.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        query, key = self.query_and_key(x)  # (B, G, D)
        value = self.project_value(x)  # (B, C, H, W)
        state = functional.linear_state(key, value)
        normaliser = functional.feature_map(key)
        if memory:
            state = memory[0] + state
            normaliser = memory[1] + normaliser
        out = functional.linear_attention(query, state, normaliser).to(value.dtype)
        return out, (state, normaliser)
