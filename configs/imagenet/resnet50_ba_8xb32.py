# ResNet-50 with BA on ImageNet-1K (Table 6).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(backbone=dict(plugins=[dict(cfg=dict(type="mrla_mm.BA"), position="after_conv3")]))
