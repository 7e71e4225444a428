# Mask R-CNN on a plain PVTv2-B1, 1x schedule: the baseline that the MRLA configs are compared with.
_base_ = "./mask_rcnn_pvtv2_b0_1x.py"
model = dict(
    backbone=dict(
        arch="b1",
        init_cfg=dict(
            checkpoint="https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b1.pth"
        ),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
