# Faster R-CNN on ResNet-50 with ECA, 1x schedule (Table 2).
_base_ = "../faster_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[dict(cfg=dict(type="mrla_mm.ECA"), position="after_conv3")],
    )
)
