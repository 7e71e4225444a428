# Mask R-CNN on a narrow, three-stage MRLA-light ResNet-18, from scratch on the generated shapes.
_base_ = [
    "mmdet::_base_/models/mask-rcnn_r50_fpn.py",
    "../_base_/shapes_instance.py",
]

model = dict(
    backbone=dict(
        type="MRLAResNet",
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        layer_attention=dict(type="MRLALight", head_channels=16),
        # From scratch, branches that start at zero would cost the first epochs.
        zero_init_attention=False,
        zero_init_residual=False,
        frozen_stages=-1,
        norm_eval=False,
        init_cfg=None,
    ),
    # Levels of stride 8, 16 and 32 with anchors of 16 to 96 pixels: no stride-4 level, the
    # costliest of all.
    neck=dict(
        in_channels=[64, 128],
        out_channels=64,
        num_outs=3,
        add_extra_convs="on_output",
        norm_cfg=dict(type="BN"),
    ),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[2, 3], strides=[8, 16, 32]),
        # Averaged over 256 anchors, of which a few per picture are positive.
        loss_bbox=dict(loss_weight=5.0),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, featmap_strides=[8, 16, 32], finest_scale=32),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=6),
        mask_roi_extractor=dict(out_channels=64, featmap_strides=[8, 16, 32], finest_scale=32),
        mask_head=dict(
            in_channels=64,
            num_convs=2,
            conv_out_channels=32,
            norm_cfg=dict(type="BN"),
            num_classes=6,
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=48)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100), rcnn=dict(max_per_img=50)),
)
