"""DIA: one LSTM per stage weighs the channels of each block; a variant of layer attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from mrla_mm.attention.base import Attended, Memory
from mrla_mm.comparators.channel import reduced_channels
from mrla_mm.errors import InputError
from mrla_mm.registry import MODELS

SHARED = (nn.Linear, nn.Conv2d, nn.ReLU)  # kinds of layers that a stage shares


class SharedCell(nn.Module):
    """Weights of a recurrent cell whose gates follow two layers, C to C // reduction to gates C."""

    def __init__(self, channels: int, reduction: int, gates: int) -> None:
        super().__init__()
        inner = reduced_channels(channels, reduction)
        self.from_input, self.from_hidden = (
            nn.Sequential(nn.Linear(channels, inner), nn.ReLU(), nn.Linear(inner, gates * channels))
            for _ in range(2)
        )

    def weights(self) -> Memory:
        """Return copies of weight and bias of the four linear layers; see `shared_weights`."""
        return shared_weights(*self.from_input, *self.from_hidden)


def shared_weights(*layers: nn.Module) -> Memory:
    """Return copies of weight and bias of layers that a stage shares, which are not called.

    Reentrant checkpointing of the stage's first block would make the parameters themselves its
    results, and no leaves any more. Raises InputError if a layer was replaced, or makes its weight
    when it is called, as pruning does.
    """
    found = []
    for layer in layers:
        as_built = type(layer) in SHARED and "forward" not in layer.__dict__
        if {"weight", "bias"} & layer.__dict__.keys() or not (as_built or is_parametrized(layer)):
            raise InputError(
                "the blocks of a stage share these layers by their weights and never call them: "
                "make pruning permanent, or use torch.nn.utils.parametrize"
            )
        for name in ("weight", "bias"):
            if getattr(layer, name, None) is not None:
                found.append(getattr(layer, name).clone())
    return tuple(found)


def run_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Run two linear layers with a ReLU between them."""
    return F.linear(F.linear(x, weight, bias).relu(), weight2, bias2)


def cell_gates(pooled: Tensor, hidden: Tensor, weights: Memory) -> Tensor:
    """Gates of a `SharedCell` before their activations: two (B, C) -> (B, gates C)."""
    half = len(weights) // 2
    from_input, from_hidden = weights[:half], weights[half:]
    return run_mlp(pooled, *from_input) + run_mlp(hidden, *from_hidden)


@MODELS.register_module()
class DIA(nn.Module):
    """Dense and implicit attention, o^t = x^t h^t with h^t, c^t = LSTM(GAP(x^t), h^{t-1}, c^{t-1}).

    The LSTM's output is a sigmoid in place of a tanh (Huang et al., AAAI 2020). As the paper has
    it, x is a block's last convolution, before the shortcut:
    ``ComparatorResNet(50, layer_attention="mrla_mm.DIA")``. In the backbones with MRLA it is a
    residual branch after the block. The memory is h and c (B, C) and the LSTM's weights, which the
    stage's first layer holds.

    Args:
        reduction: see `SharedCell`; 20 gives the paper's 28.4 M parameters.
        first_in_stage: this layer starts a stage and holds its LSTM. Set by the stage.
    """

    def __init__(self, channels: int, reduction: int = 20, *, first_in_stage: bool = False) -> None:
        super().__init__()
        self.lstm = SharedCell(channels, reduction, 4) if first_in_stage else None

    def forward(self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()) -> Attended:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        pooled = x.mean((2, 3))  # (B, C)
        if not memory:
            zeros = torch.zeros_like(pooled)
            memory = (zeros, zeros, *self.lstm.weights())
        hidden, cell, *weights = memory
        gates = cell_gates(pooled, hidden, weights)
        input_gate, forget_gate, candidate, output_gate = gates.chunk(4, 1)
        cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
        hidden = output_gate.sigmoid() * cell.sigmoid()
        return x * hidden[..., None, None], (hidden, cell, *weights)
