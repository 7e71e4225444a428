# ResNet-50 with MLA (Eq. 4) on ImageNet-1K, Table 4 (a).
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(layer_attention=dict(type="MLA")))
