"""The history of MRLA-light and its norm alone on NEU-DET, otherwise as mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(value="identity", gated=False)))
