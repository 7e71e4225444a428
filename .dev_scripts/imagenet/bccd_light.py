"""Faster R-CNN on blood cells, on EfficientNet-Lite0 with MRLA-light from ImageNet weights."""

_base_ = "../bccd/mrla_light.py"
model = dict(
    data_preprocessor=dict(mean=[127.0] * 3, std=[128.0] * 3),
    backbone=dict(
        _delete_=True,
        type="WithLayerAttention",
        backbone="mmpretrain.TIMMBackbone",
        model_name="tf_efficientnet_lite0",
        features_only=True,
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type="Pretrained", checkpoint="work_dirs/efficientnet_lite0.pth"),
    ),
    neck=dict(in_channels=[24, 40, 112, 320]),
)
