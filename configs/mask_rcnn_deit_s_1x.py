# Mask R-CNN on a plain DeiT-Small with a simple feature pyramid, 1x schedule: the baseline of the
# MRLA configs.
_base_ = "./mask_rcnn_deit_t_1x.py"
model = dict(
    backbone=dict(
        arch="deit-small",
        init_cfg=dict(
            checkpoint="https://dl.fbaipublicfiles.com/deit/deit_small_patch16_224-cd65a155.pth"
        ),
    ),
    neck=dict(in_channels=384),
)
