"""Softmax layer attention: MRLA-base, which keeps keys and values, and MLA, which derives them anew."""

from typing import NamedTuple

from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention.base import LayerAttention
from mrla_mm.ops import Affine, base_block_end, global_average, softmax_scores, weighted_sum


class SoftmaxMemory(NamedTuple):
    """Keys (B, G, D) and values (B, C, H, W) of the stage's layers so far, each kept once."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class MLAMemory(NamedTuple):
    """Feature maps x^s (B, C, H, W) of the stage's layers so far."""

    maps: tuple[Tensor, ...] = ()


@MODELS.register_module()
class MRLABase(LayerAttention):
    """MRLA-base, o^t_h = sum_{s<=t} softmax_s(q^t_h . k^s_h / sqrt(D)) v^s_h (Eq. 6, Algorithm 1).

    Each value is kept once and never concatenated, so memory grows linearly with the depth of the stage. Arguments are
    those of `LayerAttention`.
    """

    takes_affine = True

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: SoftmaxMemory | None = None, affine: Affine | None = None
    ) -> tuple[Tensor, SoftmaxMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        earlier = memory or SoftmaxMemory()
        self.check(x, memory, *earlier.values)
        query, key = self.query_and_key(x)  # (B, G, D)
        kept = SoftmaxMemory((*earlier.keys, key), (*earlier.values, self.project_value(x)))
        return weighted_sum(softmax_scores(query, kept.keys), kept.values, x=x, affine=affine), kept

    @property
    def takes_block_end(self) -> bool:
        """Whether `end_block` does as forward does: with a linear value, unless forward is no longer this one."""
        linear = self.value is not None and not self.value_gelu
        return linear and getattr(self.forward, "__func__", None) is MRLABase.forward

    def end_block(
        self, c: Tensor, shortcut: Tensor, affine: Affine, memory: SoftmaxMemory | None = None
    ) -> tuple[Tensor, SoftmaxMemory]:
        """Add, activate and attend as one function; the contract of `LayerAttention`."""
        earlier = memory or SoftmaxMemory()
        self.check(c, memory, shortcut, *earlier.values)
        weights = (self.query.weight, self.key.weight, self.value.weight)
        out, key, value = base_block_end(c, shortcut, weights, earlier, heads=self.heads, affine=affine)
        return out, SoftmaxMemory((*earlier.keys, key), (*earlier.values, value))


@MODELS.register_module()
class MLA(LayerAttention):
    """Multi-head layer attention: as MRLA-base, but each layer applies its own f_K and f_V to every x^s (Eq. 4).

    Quadratic in the depth of the stage, in time and in memory. Arguments are those of `LayerAttention`.
    """

    takes_affine = True

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: MLAMemory | None = None, affine: Affine | None = None
    ) -> tuple[Tensor, MLAMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        earlier = memory or MLAMemory()
        self.check(x, memory, *earlier.maps)
        kept = MLAMemory((*earlier.maps, x))
        pooled = [global_average(m) for m in kept.maps]
        keys = [self.project_key(y) for y in pooled]
        values = [self.project_value(m) for m in kept.maps]
        scores = softmax_scores(self.project_query(pooled[-1]), keys)
        return weighted_sum(scores, values, x=x, affine=affine), kept
