"""MRLA backbones for MMDetection: layer attention over the feature maps of a stage (ICLR 2023).

Importing the package is all a config needs: it makes the OpenMMLab stack run without compiled ops (`mrla_mm.compat`)
and then registers the backbones and layer-attention modules.
"""

from importlib.util import find_spec

if missing := [name for name in ("torch", "mmengine", "mmcv", "mmdet", "mmpretrain") if find_spec(name) is None]:
    wanted = "mrla_mm[lite]" if "mmcv" in missing else " ".join(missing)  # mmcv-lite never goes beside another mmcv
    raise ImportError(f"mrla_mm needs {', '.join(missing)}: pip install {wanted}")

from mrla_mm import compat  # noqa: E402

compat.install()

# The stand-in ops must be in place before mmdet is imported.
from mrla_mm import attention, backbones, datasets, engine, necks, weights  # noqa: E402
from mrla_mm.version import __version__  # noqa: E402

__all__ = ["__version__", "attention", "backbones", "compat", "datasets", "engine", "necks", "weights"]
