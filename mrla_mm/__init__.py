"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops
(`mrla_mm.compat`) and then registers the backbones and layer-attention modules.
"""

from importlib.util import find_spec
from pathlib import Path

for name in ("torch", "torchvision", "mmengine", "mmcv", "mmdet"):
    if find_spec(name) is None:
        raise ModuleNotFoundError(
            f"mrla_mm needs {name}, which is not installed: python "
            f"{Path(__file__).parent}/.mim/tools/doctor.py says how to get all that is missing"
        )

from mrla_mm import compat  # noqa: E402

compat.install()

# The stand-in ops must be in place before mmdet is imported.
from mrla_mm import (  # noqa: E402
    attention,
    backbones,
    comparators,
    datasets,
    engine,
    necks,
    registry,
    weights,
)
from mrla_mm.version import __version__  # noqa: E402
