"""MRLA-light on NEU-DET, otherwise as plain.py."""

_base_ = "./plain.py"
layer_attention = dict(type="MRLALight")
backbone = dict(type="MRLAResNet", layer_attention=layer_attention, zero_init_attention=False)
model = dict(backbone=backbone)
