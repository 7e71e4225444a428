"""The depthwise convolution and norm of MRLA-light alone, without queries, keys and history."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(gated=False, previous="none")))
