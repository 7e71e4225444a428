# Faster R-CNN on ResNet-50 with BA, 1x schedule (Table 2).
# The paper starts it from imagenet/resnet50_ba_coslr_lbs_8xb32.
_base_ = "../faster_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[dict(cfg=dict(type="mrla_mm.BA"), position="after_conv3")],
    )
)
