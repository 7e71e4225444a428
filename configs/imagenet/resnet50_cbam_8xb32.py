# ResNet-50 with CBAM on ImageNet-1K (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(backbone=dict(plugins=[dict(cfg=dict(type="mrla_mm.CBAM"), position="after_conv3")]))
