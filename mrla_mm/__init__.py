"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops
(`mrla_mm.compat`) and then registers the backbones and layer-attention modules. The classes that
derive from mmdet's and mmpretrain's are imported when the first of them is built: those packages
take longer to import than all the rest.
"""

import importlib
from functools import partial

from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from mrla_mm import compat

compat.install()

# The stand-in ops must be in place before mmdet is imported.
from mrla_mm import attention, comparators, datasets, engine, weights  # noqa: E402
from mrla_mm.version import __version__  # noqa: E402

__all__ = ["__version__", "attention", "comparators", "compat", "datasets", "engine", "weights"]

# Names that stand in the registries until their module is imported and its classes replace them
# (force=True).
BUILT_LATER = [
    (MODELS, "backbones", "MRLAEfficientNet MRLAPVTv2 MRLAResNet WithLayerAttention"),
    (MODELS, "backbones.ceit", "MRLACeiT"),
    (MODELS, "backbones.vit", "MRLAViT"),
    (MODELS, "comparators.resnet", "ComparatorResNet"),
    (MODELS, "comparators.rla", "RLAResNet"),
    (MODELS, "necks", "DroppedAveragePooling SimpleFeaturePyramid"),
    (OPTIM_WRAPPER_CONSTRUCTORS, "engine.layer_decay", "LayerDecayOptimWrapperConstructor"),
]


def import_and_build(module: str, name: str, /, *args: object, **kwargs: object) -> object:
    """Import a module of the package and build its class of this name."""
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)(*args, **kwargs)


for registry, module, names in BUILT_LATER:
    for name in names.split():
        registry.register_module(name, module=partial(import_and_build, module, name))
