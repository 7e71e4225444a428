"""The registry of scope ``mrla_mm``: ``type="mrla_mm.CBAM"``, whoever else registers a CBAM.

The paper's backbones and variants are in mmengine's own, so that configs name them without a scope.
"""

from mmengine.registry import MODELS as ROOT
from mmengine.registry import Registry

MODELS = Registry("model", parent=ROOT, scope="mrla_mm")
