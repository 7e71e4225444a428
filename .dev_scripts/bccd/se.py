"""SE in the recipe of mrla_light.py."""

_base_ = "./plain.py"
plugin = dict(position="after_conv3", cfg=dict(type="SE"))
model = dict(backbone=dict(plugins=[plugin]))
