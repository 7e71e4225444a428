"""The plain twin of neu_det_light.py."""

_base_ = "./neu_det_light.py"
model = dict(backbone=dict(layer_attention=None))
