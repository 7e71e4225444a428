"""Switching a model between the implementations of layer attention, for measurements that compare them.

plain stands for a backbone without layer attention, straightforward for the equations typed in, every product a tensor
of its own; the others are those of `mrla_mm.ops`.
"""

import os
import types
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mrla_mm.attention import LayerAttention, LayerAttentionResidual
from mrla_mm.ops import choose_path, depthwise_value, global_average, light_gate, softmax_scores

PATHS = ("plain", "straightforward", "reference", "folded", "triton")


def straightforward_light(self: LayerAttention, x: Tensor, shortcut: Tensor, memory=None, affine=None) -> tuple:
    """MRLA-light as it is written down: every product is a tensor of its own."""
    out = depthwise_value(x, self.value.weight)
    gate = light_gate(*self.query_and_key(x))
    heads = out.unflatten(1, (self.heads, -1))
    gated = (gate.to(x.dtype)[..., None, None, None] * heads).flatten(1, 2)
    return gated + self.history_scale.to(x.dtype)[:, None, None] * shortcut, None


def straightforward_sum(
    self: LayerAttention, x: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query: Tensor
) -> Tensor:
    """Softmax attention over concatenated values: the product of scores and values is a tensor T times a map's size."""
    stacked = torch.cat([v.unsqueeze(1) for v in values], dim=1).unflatten(2, (self.heads, -1))  # (B, T, G, D, H, W)
    scores = softmax_scores(query, keys).transpose(1, 2).to(x.dtype)  # (B, T, G)
    return (scores[..., None, None, None] * stacked).sum(1).flatten(1, 2)


def straightforward_base(self: LayerAttention, x: Tensor, shortcut: Tensor, memory=None, affine=None) -> tuple:
    """MRLA-base over concatenated keys and values."""
    query, key = self.query_and_key(x)
    keys, values = memory or ((), ())
    keys, values = (*keys, key), (*values, self.project_value(x))
    return straightforward_sum(self, x, keys, values, query), (keys, values)


def straightforward_mla(self: LayerAttention, x: Tensor, shortcut: Tensor, memory=None, affine=None) -> tuple:
    """MLA over concatenated keys and values."""
    maps = (*(memory or ()), x)
    pooled = [global_average(m) for m in maps]
    keys, values = [self.project_key(y) for y in pooled], [self.project_value(m) for m in maps]
    return straightforward_sum(self, x, keys, values, self.project_query(pooled[-1])), maps


STRAIGHTFORWARD = {"MRLALight": straightforward_light, "MRLABase": straightforward_base, "MLA": straightforward_mla}


def take_path(model: nn.Module, path: str) -> None:
    """Make every layer attention of a model compute by one of the paths."""
    os.environ["MRLA_OPS"] = "reference" if path in ("plain", "straightforward") else path
    for module in model.modules():
        if isinstance(module, LayerAttention):
            module.__dict__.pop("forward", None)
            if path == "straightforward":
                module.forward = types.MethodType(STRAIGHTFORWARD[type(module).__name__], module)


def usable_paths(attention: str, device: torch.device, wanted: Sequence[str] | None = None) -> list[str]:
    """Paths of a variant, by its registered name, that can run on the device, or those the user asked for."""
    if wanted:
        return list(wanted)
    paths = [name for name in PATHS[1:4] if name != "straightforward" or attention in STRAIGHTFORWARD]
    os.environ.pop("MRLA_OPS", None)
    probe = torch.zeros(1, 1, 1, 1, device=device)
    return [*paths, "triton"] if choose_path(probe).path == "triton" else paths


def wake(model: nn.Module) -> nn.Module:
    """Leave the identity start, so that layer attention takes part in outputs and gradients."""
    for module in model.modules():
        if isinstance(module, LayerAttentionResidual):
            nn.init.uniform_(module.norm.weight, 0.02, 0.05)
    return model
