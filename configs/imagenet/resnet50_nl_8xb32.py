# ResNet-50 with one NL block, in the last but one block of the third stage on ImageNet-1K (Table
# 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(
    backbone=dict(
        plugins=[
            dict(
                cfg=dict(type="NonLocal2d"),
                stages=(False, False, True, False),
                blocks=(-2,),
                position="after_conv3",
            )
        ]
    )
)
