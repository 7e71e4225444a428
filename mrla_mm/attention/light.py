"""MRLA-light: linear in depth, a gated value plus a scaled history."""

from typing import NamedTuple

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.arguments import FLAG, check_arguments, one_of
from mrla_mm.attention.base import LayerAttention, Memory
from mrla_mm.errors import InputError
from mrla_mm.ops import Affine, LightWeights, light, light_attention, light_block_end, light_gate

LIGHT_RULES = dict(previous=one_of("shortcut", "output", "none"), learnable_lambda=FLAG, gated=FLAG)


class LightMemory(NamedTuple):
    """Output o^{t-1} (B, C, H, W) of the stage's last light attention."""

    output: Tensor


@MODELS.register_module()
class MRLALight(LayerAttention):
    """MRLA-light, o^t_h = sigmoid(q^t_h . k^t_h / sqrt(D)) v^t_h + lambda^t_h previous_h (Eq. 8, Algorithm 3).

    Args:
        channels: see `LayerAttention`, as for all arguments not listed.
        head_channels: see `LayerAttention`.
        previous: the history term. "shortcut" takes the block's identity path, which carries the last block's
            attention through the residual (how the published models were trained); "output" takes the last block's o
            within the stage, as Algorithm 3 is written; "none" drops the term, Table 4 (b).
        learnable_lambda: learn lambda, or fix it at 1, Table 4 (e).
        gated: weigh the value by query and key; without, the value alone, Table 4 (g) together with previous="none".
    """

    token_defaults = dict(LayerAttention.token_defaults, value="dwconv_gelu")

    def __init__(
        self,
        channels: int,
        head_channels: int = 32,
        *,
        previous: str = "shortcut",
        learnable_lambda: bool = True,
        gated: bool = True,
        **kwargs: object,
    ) -> None:
        own = dict(previous=previous, learnable_lambda=learnable_lambda, gated=gated)
        check_arguments(own, LIGHT_RULES)
        super().__init__(channels, head_channels, **kwargs)
        idle = [name for name in ("projection", "reduction", "kernel_size") if name in kwargs]
        if idle and not gated:
            raise InputError(f"gated=False leaves no query and key for {idle[0]}={kwargs[idle[0]]!r}; drop one of them")
        if previous == "none" and not learnable_lambda:
            raise InputError("learnable_lambda=False fixes the weight of a history that previous='none' drops")
        self.previous = previous
        self.gated = gated
        if not gated:
            del self.query, self.key
        # An unused parameter would stop DistributedDataParallel, so lambda exists only where there is a history.
        has_history = previous == "shortcut" or (previous == "output" and not self.first_in_stage)
        learned = has_history and learnable_lambda
        self.history_scale = nn.Parameter(torch.ones(channels)) if learned else None

    @property
    def takes_affine(self) -> bool:
        """Whether forward can do the residual branch's work: not where o becomes the memory, nor behind a GELU."""
        return self.previous != "output" and not self.value_gelu

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: LightMemory | None = None, affine: Affine | None = None
    ) -> tuple[Tensor, Memory]:
        """Attend; the contract of `LayerAttention`. There is a memory only for previous="output"."""
        history = self.history(shortcut, memory)
        self.check(x, memory, *(() if history is None else (history,)))
        if self.value_gelu:
            gate = light_gate(*self.query_and_key(x)) if self.gated else None  # (B, G)
            out = light_attention(self.project_value(x), gate, history, self.history_scale)  # (B, C, H, W)
        else:
            out = light(x, history, self.weights(), heads=self.heads, affine=affine)  # (B, C, H, W)
        return out, LightMemory(out) if self.previous == "output" else None

    @property
    def takes_block_end(self) -> bool:
        """Whether `end_block` computes what forward does: as `takes_affine`, unless forward is no longer this one."""
        return self.takes_affine and getattr(self.forward, "__func__", None) is MRLALight.forward

    def end_block(self, c: Tensor, shortcut: Tensor, affine: Affine, memory: None = None) -> tuple[Tensor, None]:
        """Add, activate and attend as one function; the contract of `LayerAttention`."""
        self.check(c, memory, shortcut)
        options = dict(heads=self.heads, affine=affine, history=self.previous == "shortcut")
        return light_block_end(c, shortcut, self.weights(), **options), None

    @property
    def uses_shortcut(self) -> bool:
        """Whether the block's shortcut enters the attention."""
        return self.previous == "shortcut"

    def weights(self) -> LightWeights:
        """Parameters as the operator takes them."""
        query, key = (self.query.weight, self.key.weight) if self.gated else (None, None)
        return LightWeights(query, key, None if self.value is None else self.value.weight, self.history_scale)

    def history(self, shortcut: Tensor, memory: LightMemory | None) -> Tensor | None:
        """Tensor (B, C, H, W) that lambda scales, or None."""
        if self.previous == "shortcut":
            if shortcut is None:
                raise InputError("previous='shortcut' needs the block's shortcut, got None")
            return shortcut
        return memory.output if memory is not None else None
