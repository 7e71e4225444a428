"""Linearised recurrent layer attention, the paper's other road to linear cost."""

from typing import NamedTuple

from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention.base import LayerAttention
from mrla_mm.ops import feature_map, linear_attention, linear_state


class LinearMemory(NamedTuple):
    """Running sums U (B, G, D, D, H, W) of phi(k)^T v and Z (B, G, D) of phi(k) over the stage's layers so far."""

    state: Tensor
    normaliser: Tensor


@MODELS.register_module()
class LinearRLA(LayerAttention):
    """Linearised RLA, o^t = phi(q^t) U^t / (phi(q^t) Z^t) with phi = elu + 1, per head (App. A.3).

    The memory has a fixed size whatever the depth, but U is D times as large as a feature map:
    prefer small heads. Arguments are those of `LayerAttention`.
    """

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: LinearMemory | None = None
    ) -> tuple[Tensor, LinearMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        query, key = self.query_and_key(x)  # (B, G, D)
        value = self.project_value(x)  # (B, C, H, W)
        state, normaliser = linear_state(key, value), feature_map(key)
        if memory is not None:
            state, normaliser = memory.state + state, memory.normaliser + normaliser
        return linear_attention(query, state, normaliser).to(value.dtype), LinearMemory(
            state, normaliser
        )
