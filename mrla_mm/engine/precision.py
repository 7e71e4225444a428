"""Mixed precision on a CPU, which mmengine's AmpOptimWrapper does not support."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mrla_mm.registry import register


@register(OPTIM_WRAPPERS)
class BFloat16OptimWrapper(OptimWrapper):
    """Trains in bfloat16 mixed precision on any device.

    bfloat16 has the range of float32, so the loss is not scaled.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a model in bfloat16 where torch's autocast does."""
        device = next(model.parameters()).device.type
        with super().optim_context(model), torch.autocast(device, dtype=torch.bfloat16):
            yield
