# ResNet-152 with MRLA-light on ImageNet-1K (App. B.1).
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(depth=152))
