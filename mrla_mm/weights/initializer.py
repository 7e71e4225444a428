"""`init_cfg=dict(type="Pretrained", checkpoint=...)` of this package's modules: strict, and with a report.

mmengine's own initializer loads whatever matches, be it nothing, with a warning among others. For modules of other
packages it stays as it is, but that nothing at all matched is an error for them too.
"""

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.model.weight_init import PretrainedInit, update_init_info
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import nn

from mrla_mm.errors import InputError
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.loading import load_weights
from mrla_mm.weights.states import find_state, sample

_load_leniently = PretrainedInit.__call__


@WEIGHT_INITIALIZERS.register_module(name="Pretrained", force=True)
class StrictPretrained(PretrainedInit):
    """Loads a weight file into a module of this package, refusing one of which something does not match.

    Args:
        checkpoint: path, URL or `catalogue://name`.
        prefix: prefix of the module's keys in the file, found out for backbones by default.
        map_location: taken for compatibility; weights are read onto the CPU and copied to where the module is.
        strict: False loads what matches and reports the rest.
        entry: entry of the file to take, such as "model_ema" in a file that also has "model".

    Raises:
        InputError: the file cannot be used (see `load_weights`), or `strict` or `entry` is given for a module of
            another package.
    """

    def __init__(
        self,
        checkpoint: str,
        prefix: str | None = None,
        map_location: str = "cpu",
        *,
        strict: bool = True,
        entry: str | None = None,
    ) -> None:
        super().__init__(checkpoint, prefix, map_location)
        self.strict = strict
        self.entry = entry


def initialize_from_file(initializer: PretrainedInit, module: nn.Module) -> None:
    """Load strictly into a module of this package, as mmengine does into any other."""
    options = {name: getattr(initializer, name) for name in ("strict", "entry") if hasattr(initializer, name)}
    if not is_ours(module):
        if options not in ({}, {"strict": True, "entry": None}):
            raise InputError(f"init_cfg of {type(module).__name__}: strict and entry are for mrla_mm's backbones")
        load_as_mmengine(initializer, module)
        return
    report = load_weights(module, initializer.checkpoint, prefix=initializer.prefix, **options)
    print_log(report.table(), logger="current")
    # Of a type that is not "Pretrained" itself, with a scope for example, mmengine initialises the parts afterwards.
    for part in module.modules():
        if part is not module and isinstance(part, BaseModule):
            part.is_init = True
    if hasattr(module, "_params_init_info"):
        update_init_info(module, init_info=f"Pretrained: loaded from {initializer.checkpoint}")


def load_as_mmengine(initializer: PretrainedInit, module: nn.Module) -> None:
    """Load as mmengine does.

    Raises:
        InputError: no name of the file is one of the module's, and no tensor of it changed.
    """
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    _load_leniently(initializer, module)
    after = module.state_dict()
    if any(not torch.equal(tensor, after[key]) for key, tensor in before.items()):
        return
    source = find_state(read_checkpoint(initializer.checkpoint), prefix=initializer.prefix or "")
    if not source.state.keys() & after.keys():
        raise InputError(
            f"weights {initializer.checkpoint} have nothing for {type(module).__name__}: its first keys are "
            f"{sample(after)}, those of the file {sample(source.state)}. Choose another file, or name the prefix that "
            'the module has in it, such as init_cfg=dict(..., prefix="backbone.")'
        )


def is_ours(module: nn.Module) -> bool:
    """Whether a module is of a class of this package, or of one derived from it."""
    return any(cls.__module__.partition(".")[0] == __name__.partition(".")[0] for cls in type(module).__mro__)


# On the class itself, so that configs which name it instead of its registered name are no back door.
PretrainedInit.__call__ = initialize_from_file
