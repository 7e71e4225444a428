"""MRLA-light with the last block's output as its history (Algorithm 3), as mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(backbone=dict(layer_attention=dict(previous="output")))
