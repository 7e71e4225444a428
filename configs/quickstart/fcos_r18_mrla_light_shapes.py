# FCOS on a narrow three-stage MRLA-light ResNet-18, from scratch on the generated shapes: minutes on two CPU cores.
_base_ = ["../_base_/shapes_instance.py"]

model = dict(
    type="FCOS",
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    backbone=dict(
        type="MRLAResNet",
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        layer_attention=dict(type="MRLALight", head_channels=16),
        norm_eval=False,
        # From scratch, branches that start at zero would cost the first epochs.
        zero_init_attention=False,
        zero_init_residual=False,
    ),
    neck=dict(
        type="FPN",
        in_channels=[64, 128],
        out_channels=64,
        num_outs=3,
        add_extra_convs="on_output",
        norm_cfg=dict(type="BN"),
    ),
    bbox_head=dict(
        type="FCOSHead",
        num_classes=6,
        in_channels=64,
        stacked_convs=2,
        feat_channels=64,
        strides=[8, 16, 32],
        regress_ranges=((-1, 40), (40, 80), (80, 1e8)),
        center_sampling=True,
        norm_on_bbox=True,
        centerness_on_reg=True,
        norm_cfg=dict(type="BN"),
        loss_bbox=dict(type="GIoULoss", loss_weight=1.0),
    ),
    test_cfg=dict(
        nms_pre=300, min_bbox_size=0, score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=50
    ),
)
