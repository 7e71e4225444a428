"""Hooks of the configs beside: a memory format, and other starts of layer attention's norms."""

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
class BranchNorms(Hook):
    """Set the weights of the branches' norms, or let these train with batch statistics."""

    def __init__(self, weight=None, batch_statistics=False):
        self.weight = weight
        self.batch_statistics = batch_statistics

    def before_train(self, runner):
        """Set the weights, unless the run is resumed."""
        modules = runner.model.modules()
        self.norms = [each.norm for each in modules if isinstance(each, LayerAttentionResidual)]
        if self.weight is not None and runner.iter == 0:
            for norm in self.norms:
                torch.nn.init.constant_(norm.weight, self.weight)

    def before_train_iter(self, runner, *args, **kwargs):
        """Undo the backbone's norm_eval."""
        for norm in self.norms:
            norm.train(self.batch_statistics)
