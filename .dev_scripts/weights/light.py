"""MRLA-light as an identity on plain weights, otherwise as plain.py."""

_base_ = "./plain.py"
model = dict(backbone=dict(layer_attention=dict(type="MRLALight")))
