# Faster R-CNN on ResNet-50 with SE, 1x schedule (Table 2).
_base_ = "../faster_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[dict(cfg=dict(type="mrla_mm.SE"), position="after_conv3")],
    )
)
