"""What the tests of every backbone do to a backbone."""

import torch
from torch import nn

from mrla_mm.attention import LayerAttentionResidual
from tests.attention.test_tokens import algorithm_2, algorithm_4


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


def batch_norm(x, module):
    """Batch norm in evaluation of (B, C, H, W), channel by channel."""
    columns = [
        (x[:, c] - module.running_mean[c]) / torch.sqrt(module.running_var[c] + module.eps) * module.weight[c]
        + module.bias[c]
        for c in range(x.shape[1])
    ]
    return torch.stack(columns, dim=1)


def stage_by_the_algorithms(kind, plain_blocks, token_branches, tokens, grid, extra):
    """Run a stage of 32 channels: each plain block is a function, its layer attention Algorithm 4 ("light") or 2."""
    outputs, inputs, parameters = [], [], []
    for block, branch in zip(plain_blocks, token_branches, strict=True):
        inputs.append(tokens)
        outputs.append(block(tokens))
        parameters.append(dict(branch.named_parameters()))
        if kind == "light":
            tokens = algorithm_4(outputs[-1:], inputs[-1:], parameters[-1:], grid, extra, "shortcut")[-1]
        else:
            tokens = algorithm_2(outputs, inputs, parameters, grid, extra, "shortcut")[-1]
    return tokens


def assert_same_with_gradients(actual, expected, leaves, tolerance=1e-9):
    """Compare two float64 results and their gradients with respect to `leaves`, which must all be reached."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    probe = torch.randn_like(actual)
    ours = torch.autograd.grad((actual * probe).sum(), leaves)
    theirs = torch.autograd.grad((expected * probe).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
