"""Hooks and optimizer wrappers for mmengine's Runner."""

import importlib.util

from mrla_mm.engine.checkpointing import AtomicCheckpointHook
from mrla_mm.engine.compiling import CompileBackboneHook
from mrla_mm.engine.precision import BFloat16OptimWrapper
from mrla_mm.engine.timm_optimizers import timm_rmsprop_tf

if importlib.util.find_spec("mmpretrain"):
    from mrla_mm.engine.layer_decay import LayerDecayOptimWrapperConstructor
