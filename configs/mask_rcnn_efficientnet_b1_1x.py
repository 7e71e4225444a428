# Mask R-CNN on a plain EfficientNet-B1, 1x schedule: the baseline that the MRLA configs are compared with.
_base_ = "./mask_rcnn_efficientnet_b0_1x.py"
model = dict(
    backbone=dict(
        arch="b1",
        init_cfg=dict(
            checkpoint="https://download.openmmlab.com/mmclassification/v0/efficientnet/"
            "efficientnet-b1_3rdparty_8xb32-aa_in1k_20220119-619d8ae3.pth"
        ),
    )
)
