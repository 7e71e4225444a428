"""A plain ResNet in the recipe of cifar_light.py."""

_base_ = "./cifar_light.py"
model = dict(backbone=dict(layer_attention=None))
