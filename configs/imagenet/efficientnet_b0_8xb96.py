# Plain EfficientNet-B0 on ImageNet-1K: the baseline that the MRLA recipes are compared with.
_base_ = "../_base_/imagenet_efficientnet.py"
