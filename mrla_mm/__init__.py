"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops (`mrla_mm.compat`)
and then registers the backbones and layer-attention modules.
"""

from mrla_mm import compat

compat.install()

# The stand-in ops must be in place before mmdet is imported.
from mrla_mm import attention, backbones, comparators, datasets, engine, necks, weights  # noqa: E402
from mrla_mm.version import __version__  # noqa: E402

__all__ = ["__version__", "attention", "backbones", "comparators", "compat", "datasets", "engine", "necks", "weights"]
