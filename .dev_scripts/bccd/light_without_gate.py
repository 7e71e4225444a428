"""MRLA-light with its history but without queries and keys, in the recipe of mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(gated=False)))
