"""FSDP trainings that continue as they were: two faults of mmengine 0.10 and torch 2.11.

`FSDPStrategy.load_optim_state_dict` calls `optim_state_dict_to_load(state, model, optimizer)`; torch >= 2.1 expects
(model, optimizer, state) and ends with "unhashable type: 'dict'".

With `offload_to_cpu`, torch takes what it moves to the CPU for copies, which on the CPU they are not. It gathers the
whole tensors of an optimizer in one buffer, where the next kind overwrites the last: AdamW's `exp_avg` is saved as its
`exp_avg_sq`. And it frees the storage of parameters that are still to be read: a segmentation fault.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import mmengine._strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def load_optim_state_dict(self, state_dict: dict) -> None:
    """Load the optimizer's state, as a process holds it or whole, into the part that this process has."""
    own = FullyShardedDataParallel.optim_state_dict_to_load(
        model=self.model, optim=self.optim_wrapper.optimizer, optim_state_dict=state_dict
    )
    self.optim_wrapper.load_state_dict(own)


def keep_in_place(model: nn.Module) -> None:
    """Have a model that computes on the CPU save without `offload_to_cpu`: what is there need not be moved there."""
    if isinstance(model, FullyShardedDataParallel) and model.compute_device.type == "cpu":
        settings = model.get_state_dict_type(model)
        configs = settings.state_dict_config, settings.optim_state_dict_config
        model.set_state_dict_type(
            model, settings.state_dict_type, *(replace(config, offload_to_cpu=False) for config in configs)
        )


def kept_in_place(wrap_model: Callable) -> Callable:
    """Return mmengine's `_wrap_model`, followed by `keep_in_place`."""

    @wraps(wrap_model)
    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = wrap_model(self, model)
        keep_in_place(wrapped)
        return wrapped

    return wrap


def install() -> None:
    """Replace the methods where mmengine has the strategy."""
    strategy = getattr(mmengine._strategy, "FSDPStrategy", None)
    if strategy is not None and strategy.load_optim_state_dict is not load_optim_state_dict:
        strategy.load_optim_state_dict = load_optim_state_dict
        strategy._wrap_model = kept_in_place(strategy._wrap_model)
