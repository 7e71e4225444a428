# ResNet-101 with MRLA-base on ImageNet-1K (App. B.1). The paper ran out of memory here on four 32
# GB GPUs.
_base_ = "../_base_/imagenet_resnet_mrla.py"
model = dict(backbone=dict(depth=101, layer_attention=dict(type="MRLABase")))
