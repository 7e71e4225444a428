# Mask R-CNN on ResNet-50 with one NL block, in the last but one block of the third stage, 1x
# schedule (Table 3).
_base_ = "../mask_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[
            dict(
                cfg=dict(type="NonLocal2d"),
                stages=(False, False, True, False),
                blocks=(-2,),
                position="after_conv3",
            )
        ],
    )
)
