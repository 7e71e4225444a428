# The ResNet recipe for the attention modules that the paper compares MRLA with. Nothing is frozen.
_base_ = "./imagenet_resnet.py"
model = dict(backbone=dict(type="mrla_mm.ComparatorResNet", norm_eval=False, frozen_stages=-1))
