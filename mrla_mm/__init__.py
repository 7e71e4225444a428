"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops
(`mrla_mm.compat`) and then registers the backbones and layer-attention modules. The classes that
derive from mmdet's and mmpretrain's are imported when a registry is first asked for a name: those
packages take longer to import than all the rest.
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

# Modules that a registry imports at the first name that it is asked for.
IMPORTED_ON_USE = [
    (MODELS, "mrla_mm.backbones"),
    (registry.MODELS, "mrla_mm.comparators.resnet"),
    (registry.MODELS, "mrla_mm.comparators.rla"),
]
if find_spec("mmpretrain"):
    IMPORTED_ON_USE += [
        (MODELS, "mrla_mm.necks"),
        (OPTIM_WRAPPER_CONSTRUCTORS, "mrla_mm.engine.layer_decay"),
    ]

for host, module in IMPORTED_ON_USE:
    host._locations = [*host._locations, module]  # mmengine's registries share one empty list
    host._imported = False
