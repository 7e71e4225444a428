"""What the tests of every backbone do to a backbone."""

import torch
from torch import nn

from mrla_mm.attention import LayerAttentionResidual


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def branches(backbone: nn.Module) -> list[LayerAttentionResidual]:
    return [module for module in backbone.modules() if isinstance(module, LayerAttentionResidual)]


def wake(backbone: nn.Module) -> nn.Module:
    """Leave the identity start, so that layer attention takes part in outputs and gradients."""
    for branch in branches(backbone):
        for name, child in branch.named_children():
            if name.endswith("norm"):
                nn.init.uniform_(child.weight, 0.5, 1.0)
    return backbone


def gradients(backbone: nn.Module, image: torch.Tensor) -> dict[str, torch.Tensor | None]:
    backbone.zero_grad()
    sum((level**2).sum() for level in backbone(image)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in backbone.named_parameters()}
