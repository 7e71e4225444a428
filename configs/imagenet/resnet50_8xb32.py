# Plain ResNet-50: the baseline that the MRLA recipes are compared with.
_base_ = "../_base_/imagenet_resnet.py"
