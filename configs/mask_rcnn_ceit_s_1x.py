# Mask R-CNN on a plain CeiT-S with a simple feature pyramid, 1x schedule: the baseline of the MRLA
# configs.
_base_ = "./mask_rcnn_ceit_t_1x.py"
model = dict(
    backbone=dict(
        arch="ceit-small", init_cfg=dict(checkpoint="work_dirs/ceit_small_8xb128/epoch_300.pth")
    ),
    neck=dict(in_channels=384),
)
