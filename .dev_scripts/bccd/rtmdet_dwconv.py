"""The depthwise convolution and norm of MRLA-light alone, in the recipe of rtmdet_light.py."""

_base_ = "./rtmdet_light.py"
attention = dict(type="MRLALight", gated=False, previous="none")
model = dict(backbone=dict(layer_attention=attention))
