"""ECA on NEU-DET, otherwise as plain.py."""

_base_ = "./plain.py"
plugin = dict(position="after_conv3", cfg=dict(type="ECA"))
model = dict(backbone=dict(plugins=[plugin]))
