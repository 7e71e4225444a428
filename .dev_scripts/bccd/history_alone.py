"""MRLA-light's history and norm alone: no convolution, queries and keys, as mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(value="identity", gated=False)))
