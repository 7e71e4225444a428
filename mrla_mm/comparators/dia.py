"""DIA: one LSTM per stage weighs the channels of each block; a variant of layer attention."""

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.attention import Memory
from mrla_mm.attention.fusion import has_hooks
from mrla_mm.comparators.channel import reduced
from mrla_mm.errors import InputError


class DIALSTM(nn.Module):
    """Weights of an LSTM cell whose gates follow two layers, C to C // reduction to 4 C."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        inner = reduced(channels, reduction)
        self.from_input, self.from_hidden = (
            nn.Sequential(nn.Linear(channels, inner), nn.ReLU(), nn.Linear(inner, 4 * channels))
            for _ in range(2)
        )

    def weights(self) -> Memory:
        """Return copies of weight and bias of the four linear layers, which are not called.

        Reentrant checkpointing of the stage's first block would make the parameters themselves its
        results, and no leaves any more.

        Raises:
            InputError: a layer has a hook, such as that of pruning, which would never run.
        """
        found = []
        for layer in (*self.from_input, *self.from_hidden):
            if has_hooks(layer):
                raise InputError(
                    "the layers of a stage share DIA's LSTM by its weights, so hooks on it never "
                    "run: make pruning permanent, or use torch.nn.utils.parametrize"
                )
            if not isinstance(layer, nn.ReLU):
                found += [layer.weight.clone(), layer.bias.clone()]
        return tuple(found)


def two_layers(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Run two linear layers with a ReLU between them: (B, C) -> (B, 4 C)."""
    return F.linear(F.linear(x, weight, bias).relu(), weight2, bias2)


@MODELS.register_module()
class DIA(nn.Module):
    """Dense and implicit attention, o^t = x^t h^t with h^t, c^t = LSTM(GAP(x^t), h^{t-1}, c^{t-1}).

    The LSTM's output is a sigmoid in place of a tanh (Huang et al., AAAI 2020). As the paper has
    it, x is a block's last convolution, before the shortcut:
    ``ComparatorResNet(50, layer_attention=dict(type="DIA"))``. In the backbones with MRLA it is a
    residual branch behind the block. The memory is h and c (B, C) and the LSTM's weights, which the
    stage's first layer holds.

    Args:
        channels: C of the feature maps.
        reduction: see `DIALSTM`; 20 gives the paper's 28.4 M parameters.
        first_in_stage: this layer starts a stage and holds its LSTM. Set by the stage.
    """

    def __init__(self, channels: int, reduction: int = 20, *, first_in_stage: bool = False) -> None:
        super().__init__()
        self.lstm = DIALSTM(channels, reduction) if first_in_stage else None

    def forward(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory = ()
    ) -> tuple[Tensor, Memory]:
        """Attend; the contract of `LayerAttention`. The shortcut is not used."""
        pooled = x.mean((2, 3))  # (B, C)
        if not memory:
            zeros = torch.zeros_like(pooled)
            memory = (zeros, zeros, *self.lstm.weights())
        hidden, cell, *weights = memory
        gates = two_layers(pooled, *weights[:4]) + two_layers(hidden, *weights[4:])
        take, forget, new, give = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + take.sigmoid() * new.tanh()
        hidden = give.sigmoid() * cell.sigmoid()
        return x * hidden[..., None, None], (hidden, cell, *weights)
