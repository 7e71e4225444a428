"""MRLA-light: linear in depth, a gated value plus a scaled history."""

from typing import NamedTuple

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.attention.base import LayerAttention, Memory, check_choice
from mrla_mm.errors import InputError
from mrla_mm.ops import light_attention, light_gate


class LightMemory(NamedTuple):
    """Output o^{t-1} (B, C, H, W) of the stage's last light attention."""

    output: Tensor


@MODELS.register_module()
class MRLALight(LayerAttention):
    """MRLA-light, o^t_h = sigmoid(q^t_h . k^t_h / sqrt(D)) v^t_h + lambda^t_h previous_h (Eq. 8, Algorithm 3).

    Args:
        channels: see `LayerAttention`, as for all arguments not listed.
        head_channels: see `LayerAttention`.
        previous: the history term. "shortcut" takes the block's identity path, which carries the
            last block's attention through the residual (how the published models were trained);
            "output" takes the last block's o within the stage, as Algorithm 3 is written; "none"
            drops the term, Table 4 (b).
        learnable_lambda: learn lambda, or fix it at 1, Table 4 (e).
        gated: weigh the value by query and key; without, the value alone, Table 4 (g) together with
            previous="none".
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
        super().__init__(channels, head_channels, **kwargs)
        check_choice("previous", previous, ("shortcut", "output", "none"))
        if not gated and (unused := {"projection", "reduction", "kernel_size"} & kwargs.keys()):
            raise InputError(
                f"gated=False leaves no query and key for {', '.join(unused)}; drop one of them"
            )
        if previous == "none" and not learnable_lambda:
            raise InputError(
                "learnable_lambda=False fixes the weight of a history that previous='none' drops"
            )
        self.previous = previous
        self.gated = gated
        if not gated:
            del self.query, self.key
        # An unused parameter would stop DistributedDataParallel, so lambda exists only where there
        # is a history.
        has_history = previous == "shortcut" or (previous == "output" and not self.first_in_stage)
        self.history_scale = (
            nn.Parameter(torch.ones(channels)) if has_history and learnable_lambda else None
        )

    @property
    def uses_shortcut(self) -> bool:
        """Whether the block's shortcut enters the attention."""
        return self.previous == "shortcut"

    def silent_arguments(self) -> dict[str, object]:
        """Return what shapes do not tell; only previous="output" asks where a stage starts."""
        starts = self.first_in_stage and self.previous == "output"
        return super().silent_arguments() | dict(previous=self.previous, first_in_stage=starts)

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: LightMemory | None = None
    ) -> tuple[Tensor, Memory]:
        """Attend; the contract of `LayerAttention`. There is a memory only for previous="output"."""
        gate = light_gate(*self.query_and_key(x)) if self.gated else None  # (B, G)
        history = self.history(shortcut, memory)  # (B, C, H, W)
        out = light_attention(
            self.project_value(x), gate, history, self.history_scale
        )  # (B, C, H, W)
        return out, self.memory(out)

    def history(self, shortcut: Tensor, memory: LightMemory | None) -> Tensor | None:
        """Map (B, C, H, W) that lambda scales, or None."""
        if self.previous == "shortcut":
            return shortcut
        return memory.output if memory is not None else None

    def memory(self, out: Tensor) -> Memory:
        """Memory that an output leaves."""
        return LightMemory(out) if self.previous == "output" else None
