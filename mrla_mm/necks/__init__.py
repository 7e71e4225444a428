"""Necks, registered in the root registry so that every OpenMMLab scope finds them."""

import importlib.util

if importlib.util.find_spec("mmpretrain"):
    from mrla_mm.necks.pooling import DroppedAveragePooling
    from mrla_mm.necks.simple_fpn import SimpleFeaturePyramid
