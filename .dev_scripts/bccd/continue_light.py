"""The same detector trained on with MRLA-light, whose branches start as an identity."""

_base_ = "./continue_plain.py"
model = dict(
    backbone=dict(type="MRLAResNet", layer_attention=dict(type="MRLALight", head_channels=32))
)
