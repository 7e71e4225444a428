"""KCLA in the recipe of mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(type="KCLA")))
