"""What `norm_eval` does, for hosts that lack it or know one kind of batch norm."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def evaluate_batch_norms(module: nn.Module) -> None:
    """Put batch norms of every kind into evaluation: they use and keep their running statistics."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.eval()
