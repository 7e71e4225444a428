"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops
(`mrla_mm.compat`) and then registers the backbones and layer-attention modules. The classes that
derive from mmdet's and mmpretrain's are imported when the first of them is built or subclassed:
those packages take longer to import than all the rest.
"""

from importlib.util import find_spec
from pathlib import Path

for name in ("torch", "torchvision", "mmengine", "mmcv", "mmdet"):
    if find_spec(name) is None:
        raise ModuleNotFoundError(
            f"mrla_mm needs {name}, which is not installed: python "
            f"{Path(__file__).parent}/.mim/tools/doctor.py says how to get all that is missing"
        )

from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS  # noqa: E402

from mrla_mm import compat  # noqa: E402

compat.install()

# The stand-in ops must be in place before mmdet is imported.
from mrla_mm import attention, comparators, datasets, engine, registry, weights  # noqa: E402
from mrla_mm.version import __version__  # noqa: E402

__all__ = [
    "__version__",
    "attention",
    "comparators",
    "compat",
    "datasets",
    "engine",
    "registry",
    "weights",
]

# Names that stand in the registries until their module is imported and its classes replace them.
BUILT_LATER = [
    (MODELS, "backbones", "MRLAEfficientNet MRLAPVTv2 MRLAResNet WithLayerAttention"),
    (MODELS, "backbones.ceit", "MRLACeiT"),
    (MODELS, "backbones.vit", "MRLAViT"),
    (registry.MODELS, "comparators.resnet", "ComparatorResNet"),
    (registry.MODELS, "comparators.rla", "RLAResNet"),
    (MODELS, "necks", "DroppedAveragePooling SimpleFeaturePyramid"),
    (OPTIM_WRAPPER_CONSTRUCTORS, "engine.layer_decay", "LayerDecayOptimWrapperConstructor"),
]

for host, module, names in BUILT_LATER:
    for name in names.split():
        registry.register(host)(registry.ClassToImport(f"{__name__}.{module}", name))
