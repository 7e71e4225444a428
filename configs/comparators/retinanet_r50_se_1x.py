# RetinaNet on ResNet-50 with SE, 1x schedule (Table 2).
_base_ = "../retinanet_r50_1x.py"
model = dict(
    backbone=dict(
        type="ComparatorResNet", plugins=[dict(cfg=dict(type="SE"), position="after_conv3")]
    )
)
