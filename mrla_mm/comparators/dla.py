"""DLA-light: MRLA-light whose shortcut is refreshed by a recurrent cell of the stage."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrla_mm.attention import MRLALight
from mrla_mm.attention.base import Attended, Memory
from mrla_mm.comparators.dia import SharedCell, cell_gates, shared_weights
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS


@MODELS.register_module()
class DLALight(MRLALight):
    """Dynamic layer attention, light (Wang et al., IJCAI 2024), for the backbones with MRLA.

        h^t, c^t = DSU(GAP(x^t); h^{t-1}, c^{t-1}),  e^t, _ = DSU(GAP(s^t); h^t, c^t)
        o^t = sigmoid(q^t . k^t / sqrt(D)) v^t + lambda^t (e^t s^t + E s^t),  s^t the shortcut

    with DSU(p; h, c) = s(c'), c' where c' = s(f) c + s(i) tanh(g), and E a depthwise 3x3
    convolution. The memory is h and c (B, C), both zero at first, and the weights of E and of the
    cell, which the stage's first layer holds. Each image has a state of its own, where the authors'
    code refreshes a batch by that of its first image.

    Args:
        reduction: see `SharedCell`; 16 on ImageNet, 20 in the authors' detector.
        first_in_stage: this layer starts a stage and holds its cell and E. Set by the stage.
        **kwargs: head_channels, value and gated of `MRLALight`.
    """

    token_defaults = dict(head_channels=16)

    def __init__(
        self, channels: int, *, reduction: int = 16, first_in_stage: bool = False, **kwargs: object
    ) -> None:
        fixed = dict(previous="shortcut", learnable_lambda=True, first_in_stage=first_in_stage)
        super().__init__(channels, **fixed, **kwargs)
        nn.init.normal_(self.history_scale)
        self.has_memory = True
        self.cell = None
        self.context = None
        if first_in_stage:
            self.cell = SharedCell(channels, reduction, 3)
            self.context = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`."""
        refreshed, memory = self.refresh(x, shortcut, memory)
        return super().forward(x, refreshed)[0], memory

    def add_to(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory, scale: Tensor, offset: Tensor
    ) -> Attended:
        """Return x + scale out + offset, and the memory; see `LayerAttention`."""
        refreshed, memory = self.refresh(x, shortcut, memory)
        return super().add_to(x, refreshed, (), scale, offset)[0], memory

    def refresh(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory
    ) -> tuple[Tensor | None, Memory]:
        """Return what lambda scales (B, C, H, W), None without a shortcut, and the new memory."""
        pooled = x.mean((2, 3))  # (B, C)
        if not memory:
            if self.context.dilation != (1, 1) or self.context.padding_mode != "zeros":
                raise InputError(
                    f"a stage's blocks share {self.context}: dilation 1, padding with zeros alone"
                )
            zeros = torch.zeros_like(pooled)
            memory = (zeros, zeros, *shared_weights(self.context), *self.cell.weights())
        hidden, cell, kernel, *weights = memory
        hidden, cell = update_state(pooled, hidden, cell, weights)
        memory = (hidden, cell, kernel, *weights)
        if shortcut is None:
            return None, memory
        gate, _ = update_state(shortcut.mean((2, 3)), hidden, cell, weights)
        context = F.conv2d(shortcut, kernel, padding=1, groups=self.channels)
        return context + gate[..., None, None] * shortcut, memory


def update_state(
    pooled: Tensor, hidden: Tensor, cell: Tensor, weights: Memory
) -> tuple[Tensor, Tensor]:
    """Run the DSU, an LSTM without an output gate: three (B, C) -> the new h and c (B, C)."""
    gates = cell_gates(pooled, hidden, weights)
    input_gate, forget_gate, candidate = gates.chunk(3, 1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
    return cell.sigmoid(), cell
