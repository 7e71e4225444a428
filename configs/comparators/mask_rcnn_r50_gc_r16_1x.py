# Mask R-CNN on ResNet-50 with GC blocks of ratio 1 / 16 in all stages but the first, 1x schedule
# (Table 3).
_base_ = "../mask_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[
            dict(
                cfg=dict(type="ContextBlock", ratio=1 / 16),
                stages=(False, True, True, True),
                position="after_conv3",
            )
        ],
    )
)
