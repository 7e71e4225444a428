"""MRLA-light: linear in depth, a gated value plus a scaled history."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm import functional
from mrla_mm.attention.base import Attended, LayerAttention, Memory, check_choice
from mrla_mm.errors import InputError
from mrla_mm.registry import register


@register(MODELS)
class MRLALight(LayerAttention):
    """MRLA-light, o^t_h = sigmoid(q^t_h . k^t_h / sqrt(D)) v^t_h + lambda^t_h previous_h.

    Eq. 8 and Algorithm 3. The memory is the last output (B, C, H, W) with previous="output", else
    empty.

    Args:
        channels: see `LayerAttention`, as for all arguments not listed.
        previous: the history term. "shortcut" takes the block's identity path, which carries the
            last block's attention through the residual (how the published models were trained);
            "output" takes the last block's o within the stage, as Algorithm 3 is written; "none"
            drops the term, Table 4 (b).
        learnable_lambda: learn lambda, or fix it at 1, Table 4 (e). It starts at 1; the authors'
            code draws it from a standard normal distribution.
        gated: weigh the value by query and key; without, the value alone, Table 4 (g) together with
            previous="none".
    """

    token_defaults = dict(LayerAttention.token_defaults, value="dwconv_gelu")

    def __init__(
        self,
        channels: int,
        head_channels: int | None = None,
        *,
        previous: str = "shortcut",
        learnable_lambda: bool = True,
        gated: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(channels, head_channels, **kwargs)
        check_choice("previous", previous, ("shortcut", "output", "none"))
        check_choice("learnable_lambda", learnable_lambda, (True, False))
        check_choice("gated", gated, (True, False))
        if not gated and (unused := {"projection", "reduction"} & kwargs.keys()):
            raise InputError(f"gated=False leaves no query and key for {', '.join(unused)}")
        if previous == "none" and not learnable_lambda:
            raise InputError("learnable_lambda=False has no effect with previous='none'")
        self.previous = previous
        self.uses_shortcut = previous == "shortcut"
        self.has_memory = previous == "output"
        self.gated = gated
        if not gated:
            del self.query, self.key
        # Without a history lambda would be unused, which stops DistributedDataParallel.
        has_history = previous == "shortcut" or (previous == "output" and not self.first_in_stage)
        self.history_scale = None
        if has_history and learnable_lambda:
            self.history_scale = nn.Parameter(torch.ones(channels))

    def remove_shortcut(self) -> None:
        """Disable the shortcut and remove its lambda, which would never be trained."""
        if self.uses_shortcut:
            self.history_scale = None
        super().remove_shortcut()

    def recorded_arguments(self) -> dict[str, object]:
        """Add `previous`; only with "output" does first_in_stage change the result."""
        starts = self.first_in_stage and self.previous == "output"
        return super().recorded_arguments() | dict(previous=self.previous, first_in_stage=starts)

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`."""
        out = self.scaled_value(x, self.gate(x)) if self.gated else self.project_value(x)
        history = self.choose_history(shortcut, memory)  # (B, C, H, W)
        if history is not None:
            out = add_history(out, self.history_scale, history)
        return out, (out,) if self.previous == "output" else ()

    def add_to(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory, scale: Tensor, offset: Tensor
    ) -> Attended:
        """Return x + scale out + offset, and the memory; see `LayerAttention`.

        y = x + (scale gate) f_V(x) + offset + (scale lambda) p.
        """
        if self.previous == "output":  # the memory is the output itself
            return super().add_to(x, shortcut, memory, scale, offset)
        gain = scale * self.gate(x) if self.gated else scale  # (B, C)
        residual = functional.can_fold_residual(x)  # else x comes last: sums onto it would round
        y = self.scaled_value(x, gain, offset, residual=residual)
        history = self.choose_history(shortcut, memory)
        if history is not None:
            slope = scale if self.history_scale is None else scale * self.history_scale
            y = add_history(y, slope, history)
        return (y if residual else x + y), ()

    def gate(self, x: Tensor) -> Tensor:
        """Gate of each channel: (B, C, H, W) -> (B, C)."""
        per_head = functional.light_gate(*self.query_and_key(x))  # (B, G)
        return functional.expand_heads(per_head, self.channels)

    def choose_history(self, shortcut: Tensor | None, memory: Memory) -> Tensor | None:
        """Map (B, C, H, W) that lambda scales, or None."""
        if self.previous == "shortcut":
            return shortcut if self.uses_shortcut else None
        return memory[0] if memory else None


def add_history(out: Tensor, slope: Tensor | None, history: Tensor) -> Tensor:
    """Add slope times the history to a map (B, C, H, W); slope (C,) or (B, C), None for 1."""
    history = history.to(out.dtype)
    if slope is None:
        return out + history
    return torch.addcmul(out, functional.on_map(slope, out), history)
