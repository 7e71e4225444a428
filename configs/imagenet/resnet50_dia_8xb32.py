# ResNet-50 with DIA on ImageNet-1K (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(backbone=dict(layer_attention=dict(type="mrla_mm.DIA")))
