"""MRLA-light's norm alone, over the block's output, in the recipe of mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(value="identity", gated=False, previous="none")))
