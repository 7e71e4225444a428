"""MRLA-light with lambda = 1, in the recipe of mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(learnable_lambda=False)))
