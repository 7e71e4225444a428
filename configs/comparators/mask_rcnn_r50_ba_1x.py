# Mask R-CNN on ResNet-50 with BA, 1x schedule (Tables 3, 8 and 9).
# The paper starts it from imagenet/resnet50_ba_coslr_lbs_8xb32.
_base_ = "../mask_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="mrla_mm.ComparatorResNet",
        plugins=[dict(cfg=dict(type="mrla_mm.BA"), position="after_conv3")],
    )
)
