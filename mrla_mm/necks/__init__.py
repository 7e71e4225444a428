"""Necks, registered in the root registry so that every OpenMMLab scope finds them."""

from mrla_mm.necks.pooling import DroppedAveragePooling
from mrla_mm.necks.simple_fpn import SimpleFeaturePyramid
