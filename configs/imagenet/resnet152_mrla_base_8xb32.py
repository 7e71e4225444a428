# ResNet-152 with MRLA-base on ImageNet-1K (App. B.1). The paper ran out of memory on ResNet-101
# already.
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(depth=152, layer_attention=dict(type="MRLABase")))
