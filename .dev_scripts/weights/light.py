"""MRLA-light as an identity on plain weights, otherwise as plain.py."""

_base_ = "./plain.py"
layer_attention = dict(_delete_=True, type="MRLALight")
model = dict(backbone=dict(layer_attention=layer_attention))
