"""Hooks of the configs beside: a memory format, and another start of layer attention's norms."""

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mrla_mm.attention import LayerAttentionResidual


@HOOKS.register_module()
class ChannelsLast(Hook):
    """Keep the model's weights, and so its maps, in channels-last order."""

    def before_train(self, runner):
        """Reorder the weights."""
        runner.model.to(memory_format=torch.channels_last)


@HOOKS.register_module()
class SmallNormWeights(Hook):
    """Start the branches' norms with weights of 0.1 in place of 0."""

    def before_train(self, runner):
        """Set the weights, unless the run is resumed."""
        for module in runner.model.modules():
            if isinstance(module, LayerAttentionResidual) and runner.iter == 0:
                torch.nn.init.constant_(module.norm.weight, 0.1)
