# Mask R-CNN on a plain EfficientNet-B0, 1x schedule: the baseline that the MRLA configs are compared with.
_base_ = ["mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", "./_base_/mrla_mm.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="EfficientNet",
        arch="b0",
        out_indices=(2, 3, 4, 5),
        norm_eval=True,
        init_cfg=dict(
            type="Pretrained",
            prefix="backbone",
            checkpoint="https://download.openmmlab.com/mmclassification/v0/efficientnet/"
            "efficientnet-b0_3rdparty_8xb32-aa_in1k_20220119-8d939117.pth",
        ),
    ),
    neck=dict(in_channels=[24, 40, 112, 320]),
)
auto_scale_lr = dict(enable=True, base_batch_size=16)
