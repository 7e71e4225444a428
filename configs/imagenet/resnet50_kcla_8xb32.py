# ResNet-50 with KCLA on ImageNet-1K.
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(layer_attention=dict(type="mrla_mm.KCLA", head_channels=64)))
