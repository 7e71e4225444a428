"""DIA: one LSTM per stage that weighs the channels of each block, as a variant of layer attention."""

from typing import NamedTuple

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.comparators.channel import reduced
from mrla_mm.ops import global_average


class DIALSTM(nn.Module):
    """LSTM cell: its gates follow two layers, C to C // reduction to 4 C, and its output a sigmoid in place of tanh."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        inner = reduced(channels, reduction)
        self.from_input, self.from_hidden = (
            nn.Sequential(nn.Linear(channels, inner), nn.ReLU(), nn.Linear(inner, 4 * channels))
            for _ in range(2)
        )

    def forward(self, pooled: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step: three (B, C) -> the new hidden state and cell, (B, C)."""
        take, forget, new, give = (self.from_input(pooled) + self.from_hidden(hidden)).chunk(4, 1)
        cell = forget.sigmoid() * cell + take.sigmoid() * new.tanh()
        return give.sigmoid() * cell.sigmoid(), cell


class DIAMemory(NamedTuple):
    """State of a stage's LSTM, (B, C) each, and the LSTM itself, which the stage's first layer holds."""

    hidden: Tensor
    cell: Tensor
    lstm: DIALSTM


@MODELS.register_module()
class DIA(nn.Module):
    """Dense and implicit attention, o^t = x^t h^t with h^t, c^t = LSTM(GAP(x^t), h^{t-1}, c^{t-1}) (AAAI 2020).

    As the paper has it, x is a block's last convolution, before the shortcut:
    ``ComparatorResNet(50, layer_attention=dict(type="DIA"))``. In the backbones with MRLA it is a
    residual branch behind the block.

    Args:
        channels: C of the feature maps.
        reduction: see `DIALSTM`; 20 gives the paper's 28.4 M parameters.
        first_in_stage: this layer starts a stage and holds its LSTM. Set by the stage.
    """

    def __init__(self, channels: int, reduction: int = 20, *, first_in_stage: bool = False) -> None:
        super().__init__()
        self.lstm = DIALSTM(channels, reduction) if first_in_stage else None

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: DIAMemory | None = None
    ) -> tuple[Tensor, DIAMemory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        pooled = global_average(x)  # (B, C)
        if memory is None:
            memory = DIAMemory(torch.zeros_like(pooled), torch.zeros_like(pooled), self.lstm)
        hidden, cell = memory.lstm(pooled, memory.hidden, memory.cell)
        return x * hidden[..., None, None], DIAMemory(hidden, cell, memory.lstm)
