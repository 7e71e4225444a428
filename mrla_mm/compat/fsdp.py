"""Continuing a training under FSDP: mmengine 0.10 hands the optimizer's state to torch in the order of before 2.1.

`FSDPStrategy.load_optim_state_dict` calls `optim_state_dict_to_load(state, model, optimizer)`; torch >= 2.1 expects
(model, optimizer, state) and ends with "unhashable type: 'dict'".
"""

import mmengine._strategy
from torch.distributed.fsdp import FullyShardedDataParallel


def load_optim_state_dict(self, state_dict: dict) -> None:
    """Load the optimizer's state, as a process holds it or whole, into the part that this process has."""
    own = FullyShardedDataParallel.optim_state_dict_to_load(
        model=self.model, optim=self.optim_wrapper.optimizer, optim_state_dict=state_dict
    )
    self.optim_wrapper.load_state_dict(own)


def install() -> None:
    """Replace the method where mmengine has the strategy."""
    strategy = getattr(mmengine._strategy, "FSDPStrategy", None)
    if strategy is not None:
        strategy.load_optim_state_dict = load_optim_state_dict
