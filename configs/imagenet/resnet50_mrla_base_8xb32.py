# ResNet-50 with MRLA-base on ImageNet-1K (App. B.1).
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(layer_attention=dict(type="MRLABase")))
