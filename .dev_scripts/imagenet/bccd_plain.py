"""The plain twin of bccd_light.py."""

_base_ = "./bccd_light.py"
model = dict(backbone=dict(layer_attention=None))
