# ResNet-50 with one GC block, in the last block of the third stage on ImageNet-1K (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(
    backbone=dict(
        plugins=[
            dict(
                cfg=dict(type="ContextBlock", ratio=1 / 16),
                stages=(False, False, True, False),
                blocks=(-1,),
                position="after_conv3",
            )
        ]
    )
)
