# ResNet-50 with RLA_g on ImageNet-1K (Table 1). The classifier reads the hidden state too.
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(
    backbone=dict(type="mrla_mm.RLAResNet", out_hidden=True), head=dict(in_channels=2048 + 32)
)
