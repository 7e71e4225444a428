# ResNet-50 with AA convolutions in all stages but the first, on ImageNet-1K (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(backbone=dict(dcn=dict(type="mrla_mm.AA"), stage_with_dcn=(False, True, True, True)))
